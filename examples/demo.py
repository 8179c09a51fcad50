"""`make demo`: the tiny model of this repository continues a few sentences, through the whole engine.

    python examples/demo.py [--model DIR]

Every prompt is continued greedily and at two temperatures with different seeds, all in one batch: requests of
different lengths share each step, and the copies of a prompt share its blocks in the cache. On a CPU this takes
seconds; the small buckets below keep what has to be compiled small, too.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from jaxvllm import Engine, SamplingParams

TINY_KJV = Path(__file__).parent / "tiny-kjv"
PROMPTS = (
    "In the beginning God created",
    "And it came to pass in those days, that there went out a decree from",
    "The Lord is my shepherd;",
    "And Jesus answered and said unto them,",
    "Proverbs 32\nA wise son",
)
STYLES = (
    ("greedy", 0.0, None),
    ("T = 0.7, seed 1", 0.7, 1),
    ("T = 1.0, seed 2", 1.0, 2),
)
MAX_TOKENS = 60


def to_the_last_stop(text: str) -> str:
    """Cut after the last sentence that is complete; a text without any stays as it is."""
    end = max(text.rfind(mark) for mark in ".?!")
    return text[: end + 1] if end > 0 else text


def print_outputs(outputs: list[Any]) -> None:
    """Prompts with their continuations below them, wrapped for a terminal."""
    for number, prompt in enumerate(PROMPTS):
        print(f"\n{prompt.replace(chr(10), ' / ')} ...")
        for style, output in zip(STYLES, outputs[number * len(STYLES) :], strict=False):
            text = " / ".join(to_the_last_stop(output.text).strip().splitlines())
            lines = textwrap.wrap(text, width=100, initial_indent="      ... ", subsequent_indent="          ")
            print(f"   {style[0]}")
            print("\n".join(lines))


def print_stats(stats: dict[str, Any], seconds: float, num_outputs: int, num_tokens: int) -> None:
    """What the engine did, in words; then every counter of engine.stats() as it is."""
    print(f"\n{num_outputs} continuations, {num_tokens} new tokens in {seconds:.1f} s: {num_tokens / seconds:.0f} tokens/s")
    width = max(map(len, stats))
    for name, value in stats.items():
        print(f"   {name.ljust(width)}  {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY_KJV, help="a folder with a dense Qwen3 checkpoint")
    args = parser.parse_args()
    begun = time.perf_counter()
    with Engine(
        args.model,
        block_size=16,
        num_blocks=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=512,
        decode_buckets=[16],
        token_buckets=[256],
    ) as engine:
        print(f"{args.model}: ready after {time.perf_counter() - begun:.1f} s, everything is compiled")
        prompts = [prompt for prompt in PROMPTS for _ in STYLES]
        params = [
            SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=seed)
            for _ in PROMPTS
            for _, temperature, seed in STYLES
        ]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - begun
        print_outputs(outputs)
        print_stats(engine.stats(), seconds, len(outputs), sum(len(output.token_ids) for output in outputs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
