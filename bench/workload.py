"""The headline workload: nano-vLLM's bench.py, so that figures compare. stdlib only."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, and how many tokens each is to generate (temperature 0.6, ignore_eos)."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def headline(num_prompts: int = 256, *, low: int = 100, high: int = 1024, max_id: int = 10000) -> Workload:
    """With the defaults: 256 prompts, 142,827 tokens in and 133,966 out."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, max_id) for _ in range(draw.randint(low, high))] for _ in range(num_prompts)]
    return Workload(prompts, [draw.randint(low, high) for _ in range(num_prompts)])


def random_prompts(num_prompts: int, length: int, *, max_id: int, seed: int) -> list[list[int]]:
    """Prompts of one length; another seed gives fresh ids, which no prefix cache knows."""
    draw = random.Random(seed)
    return [[draw.randint(0, max_id) for _ in range(length)] for _ in range(num_prompts)]
