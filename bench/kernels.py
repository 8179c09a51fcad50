"""The attention kernels alone: decode, fresh prompts, chunks over a prefix, mixed steps; beside the machine's ceilings.

python -m bench.kernels                 the shapes of Qwen3-0.6B and 8B
python -m bench.kernels --tune          decode's tunables: prints rows for kernels/decode_table.py
python -m bench.kernels --picture FILE  draws the recorded rows: bandwidth reached against batch and context

A figure is the time of one layer: a compiled loop over --layers layers of one cache through shuffled block tables,
under jax's profiler; the sum of the attention kernels' times over the layers. What a step computes once for all its
layers (the cuts, the order of work) isn't in it. Beside ours run, where they apply, cuDNN's attention through jax
(dense keys and values: no pages) and jax's own paged attention.
"""

import argparse
import functools
import itertools
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.ceilings import matmul_operations_per_s, median_s, read_bytes_per_s
from bench.common import RESULTS, Row, accelerator_name, parser, record
from jaxvllm import kernels
from jaxvllm.kernels import decode_triton
from jaxvllm.kernels.device import num_sms

BLOCK, HEAD_DIM, QUERY_TILE = 64, 128, 64
HEADS = {"0.6b": (16, 8), "8b": (32, 8)}
DECODE = [(256, 1024), (64, 1024), (8, 1024), (1, 1024), (1, 16384), (8, 8192)]
PREFILL = [(8, 1024, 1024), (4, 4096, 4096), (1, 16384, 16384), (8, 512, 8704)]  # sequences, new tokens, context
OURS = "paged_"  # in the names of our kernels
SMALL_DECODE, SMALL_PREFILL = [(2, 100)], [(2, 64, 64)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: (query tokens, context after it) of each sequence."""

    heads: tuple[int, int]
    rows: tuple[tuple[int, int], ...]

    @property
    def kv_bytes(self) -> int:
        return sum(context for _, context in self.rows) * 2 * self.heads[1] * HEAD_DIM * 2

    @property
    def operations(self) -> float:
        pairs = sum(new * (context - new) + new * (new + 1) / 2 for new, context in self.rows)
        return 4 * pairs * self.heads[0] * HEAD_DIM


def seconds(step: Callable[..., jax.Array], arguments: Sequence, layers: int, only: str = "") -> float:
    """Of one layer: the device's kernels with `only` in their name on a GPU; elsewhere the whole call's time."""
    compiled = jax.jit(step).lower(*arguments).compile()
    compiled(*arguments).block_until_ready()
    if jax.devices()[0].platform == "cpu":
        return median_s(lambda: compiled(*arguments), repeats=1, calls=1) / layers
    repeats = 5
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                compiled(*arguments).block_until_ready()
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    spans = [
        event.duration_ns
        for plane in data.planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
        if only in event.name
    ]
    if not spans:
        raise RuntimeError(f"no kernel named like {only!r} ran")
    return sum(spans) / 1e9 / repeats / layers


def inputs(shape: Shape, layers: int) -> dict[str, jax.Array]:
    """Random queries, cache and a shuffled table; the ragged plan's tiles."""
    rng = np.random.default_rng(0)
    counts, lens = (np.array(column, np.int32) for column in zip(*shape.rows, strict=True))
    blocks = -(-lens // BLOCK)
    order = rng.permutation(int(blocks.sum())).astype(np.int32)
    tables = np.zeros((len(lens), int(blocks.max())), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
        tables[row, :count] = order[end - count : end]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tiles = [
        (seq, start)
        for seq, count in enumerate(counts)
        for start in range(starts[seq], starts[seq] + count, QUERY_TILE)
    ]
    tile_seq, tile_start = np.array(tiles, np.int32).T
    keys = jax.random.split(jax.random.key(0))
    q_shape = int(starts[-1]), shape.heads[0], HEAD_DIM
    kv_shape = layers, 2, len(order), shape.heads[1], BLOCK, HEAD_DIM
    return {
        "q": jax.random.normal(keys[0], q_shape, jnp.bfloat16),
        "kv": jax.random.normal(keys[1], kv_shape, jnp.bfloat16),
        "block_tables": jnp.asarray(tables),
        "context_lens": jnp.asarray(lens),
        "query_start": jnp.asarray(starts),
        "tile_seq": jnp.asarray(tile_seq),
        "tile_start": jnp.asarray(tile_start),
    }


def decode_step(layers: int, backend: str, config=None) -> Callable[..., jax.Array]:
    if config is None:
        attend = functools.partial(kernels.decode_attention, backend=backend, scale=HEAD_DIM**-0.5)
    else:
        attend = functools.partial(decode_triton.decode_attention, config=config, scale=HEAD_DIM**-0.5)

    def step(q, kv, tables, lens):
        def layer(i, state):
            return attend(state[0], kv, i, tables, lens, state[1])

        return lax.fori_loop(0, layers, layer, (q, jnp.zeros(q.shape[:2], jnp.int32)))[0]

    return step


def ragged_step(layers: int, backend: str) -> Callable[..., jax.Array]:
    attend = functools.partial(kernels.ragged_attention, scale=HEAD_DIM**-0.5, query_tile=QUERY_TILE, backend=backend)

    def step(q, kv, *plan):
        return lax.fori_loop(0, layers, lambda i, q: attend(q, kv, i, *plan), q)

    return step


def cudnn_seconds(shape: Shape, layers: int) -> float:
    """cuDNN, causal, on dense keys and values, one length a sequence."""
    (new, context), batch = shape.rows[0], len(shape.rows)
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (batch, new, shape.heads[0], HEAD_DIM), jnp.bfloat16)
    kv_shape = batch, context, shape.heads[1], HEAD_DIM
    pairs = [
        [jax.random.normal(jax.random.fold_in(key, i), kv_shape, jnp.bfloat16) for i in range(layers)]
        for key in keys[1:]
    ]

    def step(q, pairs):
        for k, v in zip(*pairs, strict=True):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return q

    return seconds(step, [q, pairs], layers)


def jax_paged_seconds(shape: Shape, layers: int) -> float:
    """jax's own paged attention for GPUs (jax.experimental.pallas.ops.gpu), on pages of its own layout."""
    from jax.experimental.pallas.ops.gpu import paged_attention

    made = inputs(shape, 1)
    pages = made["kv"][0].swapaxes(1, 2)  # [2, Hkv, N, P, D]
    lens, tables = made["context_lens"], made["block_tables"]

    def step(q, keys, values):
        for _ in range(layers):
            q = paged_attention.paged_attention(q, keys, values, tables, lens)
        return q

    return seconds(step, [made["q"], pages[0], pages[1]], layers)


def measure(args: argparse.Namespace) -> None:
    """Measures and records every row, one by one."""
    on_gpu = jax.devices()[0].platform != "cpu"
    layers = args.layers if on_gpu else 2
    read = read_bytes_per_s(2**32 if on_gpu else 2**24, 7)
    rate = matmul_operations_per_s(8192 if on_gpu else 256, 7)
    note = functools.partial(record, "kernels", device=accelerator_name(), args=args)
    note([Row("ceiling, read", read / 1e12, "TB/s"), Row("ceiling, matmul", rate / 1e12, "TFLOP/s")])

    def attempt(case: str, unit: str, shape: Shape, run: Callable[[], float]) -> None:
        if args.only not in case:
            return
        try:
            taken = run()
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            return
        if unit == "us":
            note([Row(case, taken * 1e6, unit, max(shape.kv_bytes / read, shape.operations / rate) * 1e6)])
        else:
            note([Row(case, shape.operations / taken / 1e12, unit, rate / 1e12)])

    backends = ("triton", "mosaic") if on_gpu else ("xla",)
    for name, heads in list(HEADS.items())[: None if on_gpu else 1]:
        for batch, context in DECODE if on_gpu else SMALL_DECODE:
            shape = Shape(heads, ((1, context),) * batch)
            made = list(inputs(shape, layers).values())[:4]
            for backend in backends:
                step = functools.partial(seconds, decode_step(layers, backend), made, layers, OURS)
                attempt(f"decode {name} batch {batch} context {context}, {backend}", "us", shape, step)
            if on_gpu and name == "0.6b" and context == 1024:
                other = functools.partial(jax_paged_seconds, shape, layers)
                attempt(f"decode {name} batch {batch} context {context}, jax's paged op", "us", shape, other)
        for batch, new, context in PREFILL if on_gpu else SMALL_PREFILL:
            shape = Shape(heads, ((new, context),) * batch)
            few = min(layers, 8)
            made = list(inputs(shape, few).values())
            text = f"prefill {name} {batch}x{new}" + (f" over {context - new} cached" if context > new else "")
            for backend in backends:
                step = functools.partial(seconds, ragged_step(few, backend), made, few, OURS)
                attempt(f"{text}, {backend}", "TFLOP/s", shape, step)
            if on_gpu and new == context:
                attempt(f"{text}, cuDNN", "TFLOP/s", shape, functools.partial(cudnn_seconds, shape, few))
        for text, parts in (
            ("255 rows of 1024", ((1, 1024),) * 255),
            ("a chunk of 1024", ((1024, 1024),)),
            ("255 rows and a chunk", (*((1, 1024),) * 255, (1024, 1024))),
        ):
            parts = parts if on_gpu else tuple((new // 16 or 1, context // 16) for new, context in parts[-2:])
            shape, few = Shape(heads, parts), min(layers, 8)
            made = list(inputs(shape, few).values())
            step = functools.partial(seconds, ragged_step(few, backends[-1]), made, few, OURS)
            attempt(f"mixed {name} {text}, {backends[-1]}", "us", shape, step)


def tune() -> None:
    """Prints the fastest tunables by the number of pairs: programs a multiprocessor, then a DecodeRow's others."""
    rng, sms = np.random.default_rng(0), num_sms()
    for batch in (1, 8, 32, 64, 128, 192, 256):
        pairs = batch * 8
        best: dict[bool, tuple[float, tuple]] = {}
        for mixed in (False, True):
            lens = rng.integers(200, 2000, batch) if mixed else np.full(batch, 1024)
            shape = Shape(HEADS["0.6b"], tuple((1, int(n)) for n in lens))
            made = list(inputs(shape, 4).values())[:4]
            options = itertools.product((4, 8, 12), (64, 96, 128), (32, 64), (2, 4), (2, 3), (True, False))
            chosen = [o for o in options if (o[0] >= 8 or o[1] >= 96 or batch == 1) and (batch < 64 or o[1] == 128)]

            base = decode_triton.decode_config(batch, 8, HEAD_DIM, BLOCK, made[2].shape[1], 2, sms)
            for option in chosen:
                per_sm, min_tokens, tile, warps, stages, fused = option
                programs = per_sm * sms, per_sm * sms
                config = decode_triton.DecodeConfig(base.max_splits, programs, min_tokens, tile, warps, stages, fused)
                taken = seconds(decode_step(4, "triton", config), made, 4, OURS)
                if mixed not in best or taken < best[mixed][0]:
                    best[mixed] = taken, option
        print(f"up to {pairs} pairs: one length {best[False]}, mixed {best[True]}", flush=True)


def picture(path: Path) -> None:
    """The last recorded decode rows of each backend, as TB/s, and prefill rows as TFLOP/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (RESULTS / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["case"]: row for row in map(json.loads, lines)}
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for axis, kind, unit in ((axes[0], "decode", "share of the read ceiling"), (axes[1], "prefill", "TFLOP/s")):
        mine = {case: row for case, row in rows.items() if case.startswith(kind)}
        shapes = list(dict.fromkeys(case.rpartition(", ")[0].removeprefix(kind + " ") for case in mine))
        makers = list(dict.fromkeys(case.rpartition(", ")[2] for case in mine))
        for n, maker in enumerate(makers):
            values = [mine.get(f"{kind} {shape}, {maker}") for shape in shapes]
            heights = [0 if v is None else v["floor"] / v["value"] if kind == "decode" else v["value"] for v in values]
            axis.bar(np.arange(len(shapes)) + 0.8 * n / len(makers), heights, 0.8 / len(makers), label=maker)
        axis.set_xticks(np.arange(len(shapes)) + 0.3, shapes, rotation=60, ha="right", fontsize=8)
        axis.set(ylabel=unit, title=kind)
        axis.legend(fontsize=8)
    first = next(iter(rows.values()))
    figure.suptitle(f"Attention kernels, one layer, {first['device']}, commit {first['commit']}, {first['date']}")
    figure.savefig(path, dpi=110)


def main() -> None:
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=28)
    made.add_argument("--only", default="", help="only cases with this in their names")
    made.add_argument("--tune", action="store_true")
    made.add_argument("--picture", type=Path)
    args = made.parse_args()
    if args.picture:
        picture(args.picture)
    elif args.tune:
        tune()
    else:
        measure(args)


if __name__ == "__main__":
    main()
