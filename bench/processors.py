"""What processors and log-probabilities cost a decode step, and what new weights cost.

python -m bench.processors --config qwen3-0.6b --batch 256

Decode steps as in bench.steps, with the same prompts and different SamplingParams for all rows: greedy and sampled are
the plain variant of the step, the others the one with processors. Then update_params with a copy of the weights, fused
and unfused, from the call until they are on the device; the median of 3, after one that may compile.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bench.common import Row, accelerator_name, record
from bench.engines import TimedEngine, engine_parser, label, make_engine
from bench.steps import decode_step_s
from jaxvllm.config import set_backend_memory_fraction
from jaxvllm.models.params import flatten
from jaxvllm.models.registry import param_table

ALL = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.2,
       "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "bad_words": [[7, 8]], "min_tokens": 8}  # fmt: skip
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6},
    "top-k and top-p": {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    "all processors": {"temperature": 0.6, **ALL},
    "5 logprobs": {"temperature": 0.6, "logprobs": 5},
}


def update_s(engine: TimedEngine, params: Mapping[str, Any]) -> float:
    """Median seconds of update_params."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        engine.update_params(params)
        jax.block_until_ready(engine._executor.params)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    made = engine_parser(__doc__)
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--prompt-len", type=int, default=1024)
    made.add_argument("--new-tokens", type=int, default=160)
    made.add_argument("--updates-only", action="store_true", help="measure update_params alone")
    made.set_defaults(gpu_memory_utilization=0.5)  # room for copies of the weights: within what jax may have
    args = made.parse_args()
    set_backend_memory_fraction(0.9)
    with make_engine(args) as engine:

        def note(rows: list[Row]) -> None:
            if compiles := engine.stats()["compiles_after_warmup"]:
                raise SystemExit(f"{compiles} compilations after warm-up: these times are worth nothing")
            record("processors", rows, device=accelerator_name(args.tensor_parallel_size), args=args)

        rows = []
        for name, wish in () if args.updates_only else WISHES.items():
            seconds = decode_step_s(engine, args.batch, args.prompt_len, args.new_tokens, wish)
            rows.append(Row(f"{label(args)} decode batch {args.batch}, {name}", seconds * 1e3, "ms", None))
        note(rows)  # before the copies of the weights, which may not fit
        if args.tensor_parallel_size == 1:  # a copy of what is there has the canonical form
            table = param_table(engine.model_config)
            fused = {path: jnp.copy(value) for path, value in flatten(engine._executor.params).items()}
            note([Row(f"{label(args)} update_params, fused", update_s(engine, fused) * 1e3, "ms", None)])
            unfused = {}
            for path in list(fused):
                value = fused.pop(path)
                unfused |= {one.name: value[one.index].reshape(one.shape) for one in table[path].sources}
            note([Row(f"{label(args)} update_params, unfused", update_s(engine, unfused) * 1e3, "ms", None)])


if __name__ == "__main__":
    main()
