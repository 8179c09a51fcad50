"""The one table of shapes and the one table of tolerances for every backend, and the inputs made from them.

Everything that a kernel must not read is NaN: the other layer, unused blocks (block 0, where padded table entries
point, among them), slots behind a context's end, queries of pad tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

# Largest allowed |got - oracle|: absolute + relative to the oracle. float32 leaves no room for TF32 (about 1e-3).
TOLERANCES = {"float32": (5e-6, 5e-6), "bfloat16": (1e-2, 1e-2)}

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    """Heads (query, kv), head_dim and block size of a case; `spare` unused blocks."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    spare: int = 3


@dataclass(frozen=True)
class DecodeCase:
    """context_lens of a step of single-token rows."""

    name: str
    shape: Shape
    context_lens: tuple[int, ...]
    width: int | None = None  # table width, if wider than the longest context needs


@dataclass(frozen=True)
class RaggedCase:
    """(query tokens, context after the step) of each sequence, padded to `tokens` and `pad_seqs` more sequences."""

    name: str
    shape: Shape
    rows: tuple[tuple[int, int], ...]
    tokens: int
    query_tile: int = 16
    pad_seqs: int = 0
    pad_tiles: int = 0


DECODE_CASES = (
    DecodeCase("mha-4", Shape((2, 2), 16, 4), (0, 1, 4, 5, 19)),
    DecodeCase("ratio2-16", Shape((4, 2), 32, 16), (16, 0, 17, 1, 60), width=9),
    DecodeCase("ratio4-64", Shape((4, 1), 64, 64), (65, 64, 1, 200), width=4),
    DecodeCase("ratio5-16", Shape((10, 2), 16, 16), (31, 33)),
    DecodeCase("ratio8-64", Shape((8, 1), 16, 64), (300, 63)),
    DecodeCase("ratio80-4", Shape((80, 1), 16, 4), (9, 2)),
    DecodeCase("dim40-16", Shape((4, 2), 40, 16), (0, 15, 50)),
    DecodeCase("block1", Shape((2, 1), 16, 1), (1, 7)),
    DecodeCase("block128", Shape((2, 1), 32, 128), (129, 128)),
    DecodeCase("block3", Shape((2, 1), 16, 3), (10, 3)),
    DecodeCase("empty", Shape((2, 1), 16, 16), (0, 0)),
)

RAGGED_CASES = (
    RaggedCase("fresh-4", Shape((2, 2), 16, 4), ((5, 5), (1, 1), (9, 9)), tokens=16),
    RaggedCase("prefix-16", Shape((4, 2), 32, 16), ((10, 40), (17, 33), (1, 17), (16, 16)), tokens=48, pad_seqs=2),
    RaggedCase("ratio4-64", Shape((4, 1), 64, 64), ((33, 130), (20, 20)), tokens=64, pad_tiles=3),
    RaggedCase("dim40-16", Shape((4, 2), 40, 16), ((12, 30), (1, 1)), tokens=16),
    RaggedCase("singles-ratio5", Shape((5, 1), 16, 16), ((1, 1), (1, 16), (1, 17), (1, 40)), tokens=8, pad_seqs=1),
    RaggedCase("mixed-ratio8", Shape((8, 1), 16, 16), ((1, 70), (30, 30), (1, 5), (2, 34)), tokens=64, pad_seqs=1),
    RaggedCase("tile64-many-pads", Shape((2, 1), 16, 64), ((65, 70),), tokens=200, query_tile=64, pad_seqs=1),
    RaggedCase("nothing", Shape((2, 1), 16, 16), (), tokens=16, pad_seqs=2),
)
# What the Mosaic kernel can do too, in bfloat16: its head_dims and blocks, two heads and one an item, tiles that no
# consumer or only one has rows of, more items than programs, blocks that are parts of a kv tile and wholes of it.
MOSAIC_CASES = (
    RaggedCase("singles-and-chunk-16", Shape((4, 2), 64, 16), ((1, 1), (70, 200), (1, 150), (33, 40)), 112, 64, 1, 1),
    RaggedCase("shared-singles-128", Shape((4, 1), 128, 128), ((1, 9), (5, 5), (30, 290), (1, 140)), 40, query_tile=64),
    RaggedCase("one-head-256", Shape((1, 1), 64, 256), ((140, 300),), tokens=140, query_tile=128),
)

MOSAIC_DECODE_CASES = (  # what the Mosaic kernel takes: several runs a sequence, several sequences a run
    DecodeCase("runs-64", Shape((4, 2), 64, 64), (100, 0, 64, 1, 130)),
    DecodeCase("runs-16", Shape((5, 1), 64, 16), (33, 70, 5), width=9),
    DecodeCase("runs-128", Shape((2, 1), 128, 128), (200, 128, 0)),
    DecodeCase("runs-256", Shape((8, 1), 64, 256), (300,)),
    DecodeCase("runs-nothing", Shape((2, 1), 64, 32), (0, 0)),
)

# For a GPU only: real head counts, long contexts, many blocks.
LARGE_DECODE_CASES = (
    DecodeCase("qwen3-0.6b", Shape((16, 8), 128, 64), (1024, 1, 4000, 63, 64, 65, 0, 2048), width=64),
    DecodeCase("qwen3-0.6b-128", Shape((16, 8), 128, 128), (1024, 129, 3000, 128), width=32),
    DecodeCase("qwen3-8b", Shape((32, 8), 128, 64), (1000, 2000, 3, 500), width=32),
    DecodeCase("ratio5", Shape((40, 8), 128, 16), (700, 16, 1), width=64),
    DecodeCase("wide-head", Shape((16, 2), 256, 256), (1500, 256, 257), width=8),
    DecodeCase("narrow-head", Shape((8, 8), 64, 32), (900, 31), width=32),
    DecodeCase("mqa", Shape((64, 1), 128, 64), (777, 64), width=16),
    DecodeCase("long", Shape((4, 2), 128, 64), (16384,), width=256),
    DecodeCase("batch256", Shape((4, 2), 64, 64), tuple(range(1, 513, 2)), width=8),
)
LARGE_RAGGED_CASES = (
    RaggedCase("qwen3-0.6b", Shape((16, 8), 128, 64), ((300, 300), (64, 500), (1, 1000), (10, 72)), 512, 64, 5, 4),
    RaggedCase("qwen3-8b", Shape((32, 8), 128, 128), ((129, 1000), (200, 200)), 384, 64),
    RaggedCase("ratio5", Shape((40, 8), 128, 16), ((100, 333), (1, 50)), 128, 64),
    RaggedCase("wide-head", Shape((8, 2), 256, 256), ((150, 600), (3, 3)), 256, 64),
    RaggedCase("narrow-head", Shape((8, 8), 64, 32), ((77, 90), (90, 777)), 256, 64),
    RaggedCase("long-prefix", Shape((4, 2), 128, 64), ((70, 8192),), 128, 64),
    RaggedCase("singles-and-chunk", Shape((4, 2), 64, 64), (*((1, n) for n in range(1, 101)), (150, 400)), 256, 64),
    RaggedCase("singles-8b", Shape((32, 8), 128, 64), (*((1, 40 * n) for n in range(1, 33)), (250, 2000)), 288, 64, 9),
    RaggedCase("singles-ratio6", Shape((6, 1), 128, 64), ((1, 300), (1, 7), (70, 90), (1, 128)), 80, 64),
)

_DROPPED_SLOTS = (-1, -(2**31), 2**31 - 1)  # dropped, whatever the pool's size


def cache_and_tables(shape: Shape, lens, width: int | None, dtype: str, rng) -> tuple[np.ndarray, np.ndarray]:
    """kv [2, 2, N, Hkv, P, D], NaN but for the contexts' slots of layer LAYER, and shuffled tables [B, W]."""
    blocks = [-(-n // shape.block_size) for n in lens]
    width = width or max(1, *blocks, 1)
    num_blocks = sum(blocks) + shape.spare
    kv = np.full((LAYERS, 2, num_blocks, shape.heads[1], shape.block_size, shape.head_dim), np.nan, jnp.dtype(dtype))
    free = (1 + rng.permutation(num_blocks - 1)).tolist()
    tables = np.zeros((len(lens), width), np.int32)
    for seq, (count, length) in enumerate(zip(blocks, lens, strict=True)):
        tables[seq, :count] = [free.pop() for _ in range(count)]
        tables[seq, count:] = rng.choice(free) if free else 0  # stale entries: poisoned blocks
        for token in range(length):
            slot = tables[seq, token // shape.block_size], slice(None), token % shape.block_size
            kv[LAYER, :, *slot] = rng.standard_normal((2, shape.heads[1], shape.head_dim))
    return kv, tables


def decode_inputs(case: DecodeCase, dtype: str) -> dict[str, Any]:
    """Arguments of decode_attention by name."""
    rng = np.random.default_rng(len(case.name))
    kv, tables = cache_and_tables(case.shape, case.context_lens, case.width, dtype, rng)
    q = rng.standard_normal((len(case.context_lens), case.shape.heads[0], case.shape.head_dim))
    lens = np.array(case.context_lens, np.int32)
    arrivals = np.zeros(q.shape[:2], np.int32)
    return {
        "q": q.astype(kv.dtype), "kv": kv, "block_tables": tables, "context_lens": lens, "arrivals": arrivals
    }  # fmt: skip


def ragged_inputs(case: RaggedCase, dtype: str) -> dict[str, Any]:
    """Arguments of ragged_attention by name; tiles in plan order, pads at the end."""
    rng = np.random.default_rng(len(case.name))
    counts = [n for n, _ in case.rows] + [0] * case.pad_seqs
    lens = np.array([n for _, n in case.rows] + [0] * case.pad_seqs, np.int32)
    kv, tables = cache_and_tables(case.shape, lens.tolist(), None, dtype, rng)
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    used = query_start[-1]
    assert used <= case.tokens
    tiles = [
        (seq, start)
        for seq, count in enumerate(counts)
        for start in range(query_start[seq], query_start[seq] + count, case.query_tile)
    ]
    tiles += [(-1, 0)] * (case.tokens // case.query_tile + len(counts) - len(tiles) + case.pad_tiles)
    tile_seq, tile_start = np.array(tiles, np.int32).reshape(-1, 2).T
    q = rng.standard_normal((case.tokens, case.shape.heads[0], case.shape.head_dim)).astype(kv.dtype)
    q[used:] = np.nan
    return {
        "q": q,
        "kv": kv,
        "block_tables": tables,
        "context_lens": lens,
        "query_start": query_start,
        "tile_seq": tile_seq.copy(),
        "tile_start": tile_start.copy(),
    }


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments as jax arrays."""
    return {name: jnp.array(value) for name, value in inputs.items()}


def write_inputs(shape: Shape, dtype: str) -> dict[str, Any]:
    """Arguments of write_kv by name: two slots in one block, the pool's first and last, dropped ones between."""
    rng = np.random.default_rng(shape.block_size)
    num_blocks = 5
    total = num_blocks * shape.block_size
    slots = [0, *_DROPPED_SLOTS, total - 1, total, 2 * shape.block_size, total + 1, 3 * shape.block_size - 1]
    slots = np.array(list(dict.fromkeys(slots)), np.int32)
    kv = rng.standard_normal((LAYERS, 2, num_blocks, shape.heads[1], shape.block_size, shape.head_dim))
    kv[:, :, 1] = np.nan
    k, v = rng.standard_normal((2, len(slots), shape.heads[1], shape.head_dim)).astype(jnp.dtype(dtype))
    return {"kv": kv.astype(jnp.dtype(dtype)), "k": k, "v": v, "slot_mapping": slots}


WRITE_SHAPES = (
    Shape((2, 2), 16, 4),
    Shape((4, 1), 40, 16),
    Shape((3, 3), 32, 64),
    Shape((2, 2), 16, 1),
    Shape((2, 2), 16, 3),
)
