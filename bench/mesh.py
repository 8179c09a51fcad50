"""Steps on several numbers of GPUs: time, tokens/s, the all-reduces' part of it, and how well more devices help.

python -m bench.mesh --config qwen3-8b --meshes 1,2
python -m bench.mesh --draw-only            bench/results/mesh.png from the rows that are there

For each tensor_parallel_size that the machine has devices for: full decode batches and a prefill as bench.steps
measures them, and the step's all-reduces alone (bench.all_reduce): what they would cost if nothing overlapped with
them. A row a (mesh, bucket), {..., tensor_parallel_size, tokens_per_s, all_reduce_ms: {name: ms}, speed_up,
efficiency}: speed-up against the smallest mesh of the run, efficiency is speed-up / (devices / its devices).
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench.common import Row, accelerator_name, record, rounded
from bench.engines import engine_parser, make_engine, sizes
from bench.mesh_picture import draw
from bench.models import model_config
from bench.steps import decode_row, prefill_row
from jaxvllm.config import ConfigError


def prompts_of(text: str) -> tuple[int, int]:
    """ "16x1024" -> 16 prompts of 1024 tokens. Raises ArgumentTypeError."""
    num_prompts, _, length = text.partition("x")
    if not (num_prompts.isdigit() and length.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be like 16x1024")
    return int(num_prompts), int(length)


def step_rows(args: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """Rows of one mesh, each with its step's tokens. Ends the engine before it returns."""
    with make_engine(args) as engine:
        for batch in args.buckets:
            yield decode_row(engine, args, batch, args.prompt_len, args.new_tokens), batch
        num_prompts, length = args.prefill
        yield prefill_row(engine, args, num_prompts, length), num_prompts * length
        if compiles := engine.stats()["compiles_after_warmup"]:
            raise SystemExit(f"{compiles} compilations after warm-up: these times are worth nothing")


def all_reduce_ms(args: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Of a step of so many tokens (several steps, where the budget is lower), by the implementation's name."""
    from bench.all_reduce import all_reduces_s, can_exchange
    from jaxvllm.runtime.mesh import make_mesh

    mesh, config = make_mesh(args.tensor_parallel_size), model_config(args.config)
    at_once = min(tokens, args.max_num_batched_tokens)
    shape, links, calls = (at_once, config.hidden_size), 2 * config.num_hidden_layers, 10 if at_once <= 1024 else 2
    taken_s = {
        name: all_reduces_s(mesh, name, shape, config.dtype, links, repeats=args.repeats, calls=calls)
        for name in args.all_reduce or (["psum", "exchange"] if can_exchange(mesh) else ["psum"])
    }
    return {name: rounded(seconds * 1e3 * tokens / at_once) for name, seconds in taken_s.items()}


def measured(args: argparse.Namespace) -> list[Row]:
    """Rows of one mesh, without what compares it with another."""
    rows = list(step_rows(args))
    gc.collect()  # the engine's memory is free before anything else is measured
    return [
        replace(row, more={
            "tokens_per_s": rounded(tokens / row.value * 1e3),
            "all_reduce_ms": all_reduce_ms(args, tokens),
        })
        for row, tokens in rows
    ]  # fmt: skip


def compared(row: Row, first: Row, devices: float) -> Row:
    """With speed-up and efficiency against `first`, the same step on 1 / `devices` of the devices."""
    speed_up = first.value / row.value
    figures = {"speed_up": rounded(speed_up), "efficiency": rounded(speed_up / devices)}
    return replace(row, more={**row.more, **figures})


def options() -> argparse.ArgumentParser:
    made = engine_parser(__doc__, config="qwen3-8b")
    made.add_argument("--meshes", type=sizes, default=[1, 2], help="values of tensor_parallel_size (default: 1,2)")
    made.add_argument("--buckets", type=sizes, default=[1, 8, 64, 256], help="decode batches (default: 1,8,64,256)")
    made.add_argument("--prefill", type=prompts_of, default=(16, 1024), help="prompts and their length, like 16x1024")
    made.add_argument("--prompt-len", type=int, default=1024, help="of the decode batches")
    made.add_argument("--new-tokens", type=int, default=160)
    made.add_argument("--repeats", type=int, default=6, help="timings of the prefill and of the all-reduces")
    made.add_argument("--all-reduce", type=lambda text: text.split(","),
                      help="names of bench.all_reduce (default: all that run here)")  # fmt: skip
    made.add_argument("--draw-only", action="store_true", help="measure nothing, draw the recorded rows")
    made.set_defaults(tensor_parallel_size=None)
    return made


def main() -> None:
    made = options()
    args = made.parse_args()
    if args.tensor_parallel_size is not None:
        made.error("--tensor-parallel-size is one mesh; this benchmark takes several: give --meshes")
    if not args.draw_only:
        args.decode_buckets = args.decode_buckets or args.buckets
        args.token_buckets = args.token_buckets or [64, args.max_num_batched_tokens]
        args.max_num_seqs = max(args.max_num_seqs, *args.buckets)
        measure(args)
    draw(args.out, args.out / "mesh.png")


def measure(args: argparse.Namespace) -> None:
    """Appends the rows of each mesh when it is done; raises ConfigError if none could be measured."""
    first: list[Row] = []
    first_size, skipped = 0, {}
    for size in sorted(set(args.meshes)):
        mine = argparse.Namespace(**vars(args) | {"tensor_parallel_size": size})
        try:
            rows = measured(mine)
        except ConfigError as error:
            if not first:
                raise
            skipped[size] = str(error)
            continue
        if not first:
            first, first_size = rows, size
        rows = [compared(row, before, size / first_size) for row, before in zip(rows, first, strict=True)]
        record("mesh", rows, device=accelerator_name(), args=mine)
    for size, reason in skipped.items():
        print(json.dumps({"skipped": size, "reason": reason}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
