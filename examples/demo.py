"""`make demo`: the tiny model of this repository continues a few sentences, through the whole engine.

    python examples/demo.py [--model DIR]

First every prompt is continued greedily, then at two temperatures with seeds of their own: prompts of
different lengths share each step, and in the second round their beginnings are found in the prefix cache. On
a CPU most of the time goes into compiling, so there are only the two buckets below.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from pathlib import Path

import jax

from jaxvllm import Engine, RequestOutput, SamplingParams

TINY_KJV = Path(__file__).parent / "tiny-kjv"
PROMPTS = (
    "In the beginning God created",
    "And it came to pass in those days, that there went out a decree from",
    "The Lord is my shepherd;",
    "And Jesus answered and said unto them,",
    "Proverbs 32\nA wise son",
)
TEMPERATURES = (0.7, 1.0)
MAX_TOKENS = 60


def to_the_last_stop(text: str) -> str:
    """Cut after the last sentence that is complete; a text without any stays as it is."""
    end = max(text.rfind(mark) for mark in ".?!")
    return text[: end + 1] if end > 0 else text


def print_output(title: str, output: RequestOutput) -> None:
    """One continuation, wrapped for a terminal; " / " stands for a new line."""
    text = " / ".join(to_the_last_stop(output.text).strip().splitlines())
    print(f"   {title}")
    print("\n".join(textwrap.wrap(text, width=100, initial_indent="      ... ", subsequent_indent="          ")))


def print_stats(engine: Engine, outputs: list[RequestOutput], seconds: float) -> None:
    """The run in a sentence, then every counter of engine.stats() as it is."""
    new_tokens = sum(len(output.token_ids) for output in outputs)
    print(f"\n{len(outputs)} continuations, {new_tokens} new tokens in {seconds:.1f} s: ", end="")
    print(f"{new_tokens / seconds:.0f} tokens/s on {jax.devices()[0].device_kind}")
    stats = engine.stats()
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
        block_size=8,
        num_blocks=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=512,
        decode_buckets=[16],
        token_buckets=[256],
        enable_processors=False,  # nobody here filters or penalises: half as much to compile
    ) as engine:
        print(f"{args.model.name}: ready after {time.perf_counter() - begun:.1f} s, everything is compiled")
        begun = time.perf_counter()
        greedy = engine.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
        cases = [(prompt, temperature) for prompt in PROMPTS for temperature in TEMPERATURES]
        params = [
            SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=seed)
            for seed, (_, temperature) in enumerate(cases, 1)
        ]
        sampled = engine.generate([prompt for prompt, _ in cases], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        for number, prompt in enumerate(PROMPTS):
            print(f"\n{prompt.replace(chr(10), ' / ')} ...")
            print_output("greedy", greedy[number])
            for seed, (_, temperature) in enumerate(cases, 1):
                if cases[seed - 1][0] == prompt:
                    print_output(f"temperature {temperature}, seed {seed}", sampled[seed - 1])
        print_stats(engine, greedy + sampled, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
