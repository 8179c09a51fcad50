"""Times of single steps: a full decode batch at several sizes, and a prefill.

python -m bench.steps --config qwen3-0.6b

Decode: B prompts of 1024 random ids, 160 new tokens; the median time of a step in which all B decode, as the
running loop takes it (host work included where the device doesn't hide it). Prefill: 16 prompts of 1024 fresh
ids, max_tokens=1, from the call to its outputs; the median of 6.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench.common import Row, accelerator_name, record
from bench.engines import TimedEngine, engine_parser, label, make_engine
from bench.models import decode_floor_s, prefill_floor_s
from bench.workload import random_prompts
from jaxvllm import SamplingParams

SETTLING_TURNS = 4
"""Turns of the loop left out at each end of the decode phase: the pipeline fills and drains."""


def decode_step_s(
    engine: TimedEngine, batch: int, prompt_len: int, new_tokens: int, wish: Mapping[str, Any] | None = None
) -> float:
    """Median seconds between two steps of a full decode batch. wish: SamplingParams' fields, sampled without."""
    prompts = random_prompts(batch, prompt_len, max_id=_max_id(engine), seed=batch)
    before = engine.stats()["prefill_steps"]
    engine.turns.clear()
    chosen = {"temperature": 0.6} if wish is None else wish
    params = SamplingParams(**chosen, max_tokens=new_tokens, ignore_eos=True)
    engine.generate(prompts, params, use_tqdm=False)
    # all prompts are computed first, then all B decode until all end in the same step
    first = engine.stats()["prefill_steps"] - before + SETTLING_TURNS
    turns = engine.turns[first:-SETTLING_TURNS]
    return statistics.median(b - a for a, b in itertools.pairwise(turns))


def prefill_s(engine: TimedEngine, num_prompts: int, prompt_len: int, repeats: int) -> float:
    """Median seconds of a call that computes these prompts and one token each."""
    times = []
    for n in range(repeats + 1):
        prompts = random_prompts(num_prompts, prompt_len, max_id=_max_id(engine), seed=1000 + n)
        started = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first warms up


def _max_id(engine: TimedEngine) -> int:
    return min(10000, engine.model_config.vocab_size - 1)


def decode_row(engine: TimedEngine, args: argparse.Namespace, batch: int, prompt_len: int, new_tokens: int) -> Row:
    """A full decode batch's median step, beside its floor where the device has one."""
    seconds = decode_step_s(engine, batch, prompt_len, new_tokens)
    contexts = [prompt_len + new_tokens // 2] * batch
    floor = _floor_ms(decode_floor_s(engine.model_config, contexts), args.tensor_parallel_size)
    return Row(f"{label(args)} decode batch {batch}", seconds * 1e3, "ms", floor)


def prefill_row(engine: TimedEngine, args: argparse.Namespace, num_prompts: int, prompt_len: int) -> Row:
    """A prefill's median of args.repeats, beside its floor where the device has one."""
    seconds = prefill_s(engine, num_prompts, prompt_len, args.repeats)
    floor = _floor_ms(prefill_floor_s(engine.model_config, [prompt_len] * num_prompts), args.tensor_parallel_size)
    return Row(f"{label(args)} prefill {num_prompts}x{prompt_len}", seconds * 1e3, "ms", floor)


def _floor_ms(floor_s: float, devices: int) -> float | None:
    """On so many devices, that share the work evenly and exchange sums for nothing; floors are an H200's."""
    return floor_s * 1e3 / devices if "H200" in accelerator_name() else None


def main() -> None:
    made = engine_parser(__doc__)
    made.add_argument("--batches", default="1,8,64,256", help="decode batch sizes")
    made.add_argument("--prompt-len", type=int, default=1024)
    made.add_argument("--new-tokens", type=int, default=160)
    made.add_argument("--prefill-prompts", type=int, default=16)
    made.add_argument("--repeats", type=int, default=6, help="prefill timings")
    args = made.parse_args()
    with make_engine(args) as engine:
        batches = map(int, args.batches.split(","))
        rows = [decode_row(engine, args, batch, args.prompt_len, args.new_tokens) for batch in batches]
        rows.append(prefill_row(engine, args, args.prefill_prompts, args.prompt_len))
        record("steps", rows, device=accelerator_name(args.tensor_parallel_size), args=args)


if __name__ == "__main__":
    main()
