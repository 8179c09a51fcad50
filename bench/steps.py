"""Times of single steps: a full decode batch at several sizes, and a prefill.

python -m bench.steps --config qwen3-0.6b

Decode: B prompts of 1024 random ids, 160 new tokens; the median time of a step in which all B decode, as the
running loop takes it (host work included where the device doesn't hide it). Prefill: 16 prompts of 1024 fresh
ids, max_tokens=1, from the call to its outputs; the median of 6.
"""

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


def main() -> None:
    made = engine_parser(__doc__)
    made.add_argument("--batches", default="1,8,64,256", help="decode batch sizes")
    made.add_argument("--prompt-len", type=int, default=1024)
    made.add_argument("--new-tokens", type=int, default=160)
    made.add_argument("--prefill-prompts", type=int, default=16)
    made.add_argument("--repeats", type=int, default=6, help="prefill timings")
    args = made.parse_args()
    parallel = args.tensor_parallel_size
    engine = make_engine(args)
    with engine:
        device = accelerator_name(parallel)
        share = parallel if "H200" in device else None  # floors are an H200's
        config = engine.model_config
        rows = []
        for batch in map(int, args.batches.split(",")):
            seconds = decode_step_s(engine, batch, args.prompt_len, args.new_tokens)
            context = args.prompt_len + args.new_tokens // 2
            floor = share and decode_floor_s(config, [context] * batch) * 1e3 / share
            rows.append(Row(f"{label(args)} decode batch {batch}", seconds * 1e3, "ms", floor))
        seconds = prefill_s(engine, args.prefill_prompts, args.prompt_len, args.repeats)
        floor = share and prefill_floor_s(config, [args.prompt_len] * args.prefill_prompts) * 1e3 / share
        case = f"{label(args)} prefill {args.prefill_prompts}x{args.prompt_len}"
        rows.append(Row(case, seconds * 1e3, "ms", floor))
        record("steps", rows, device=device, args=args)


if __name__ == "__main__":
    main()
