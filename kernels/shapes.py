"""Shape and dtype checks at the kernels' entry, once per trace; the backends behind it don't check again.

All problems of a call are listed in one ValueError that names the argument, what it is and what it has to be.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

FLOAT_DTYPES = ("float32", "bfloat16")
MOSAIC_HEAD_DIMS = {"decode_attention": (64, 128), "ragged_attention": (64, 128, 256)}
MOSAIC_BLOCK_SIZES = (16, 32, 64, 128, 256)


def check_write(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> None:
    """Raises ValueError unless k, v are [T, Hkv, D] in the cache's dtype and slot_mapping is int32 [T]."""
    problems = _cache_problems(kv)
    if not problems:
        heads, head_dim = kv.shape[3], kv.shape[5]
        tokens = k.shape[0] if k.ndim else 0
        problems += _array_problems("k", k, (tokens, heads, head_dim), kv.dtype)
        problems += _array_problems("v", v, (tokens, heads, head_dim), kv.dtype)
        problems += _array_problems("slot_mapping", slot_mapping, (tokens,), jnp.int32)
    _raise("write_kv", problems)


def check_decode(
    q: jax.Array, kv: jax.Array, block_tables: jax.Array, context_lens: jax.Array, arrivals: jax.Array
) -> None:
    """Raises ValueError unless q is [B, Hq, D], block_tables int32 [B, W], context_lens int32 [B], arrivals [B, Hq]."""
    problems = _cache_problems(kv)
    if not problems:
        problems += _query_problems(q, kv)
        batch = q.shape[0] if q.ndim else 0
        problems += _table_problems(block_tables, context_lens, batch)
        problems += _array_problems("arrivals", arrivals, q.shape[:2], jnp.int32)
    _raise("decode_attention", problems)


def check_ragged(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    tile_seq: jax.Array,
    tile_start: jax.Array,
    query_tile: int,
) -> None:
    """Raises ValueError unless q is [T, Hq, D], the tables are [B, W] / [B] / [B + 1] and the tiles int32 [NT]."""
    problems = _cache_problems(kv)
    if not problems:
        problems += _query_problems(q, kv)
        batch = context_lens.shape[0] if context_lens.ndim else 0
        tiles = tile_seq.shape[0] if tile_seq.ndim else 0
        problems += _table_problems(block_tables, context_lens, batch)
        problems += _array_problems("query_start", query_start, (batch + 1,), jnp.int32)
        problems += _array_problems("tile_seq", tile_seq, (tiles,), jnp.int32)
        problems += _array_problems("tile_start", tile_start, (tiles,), jnp.int32)
        if query_tile < 1:
            problems.append(f"query_tile is {query_tile}, has to be at least 1")
    _raise("ragged_attention", problems)


def _cache_problems(kv: jax.Array) -> list[str]:
    if kv.ndim != 6 or kv.shape[1] != 2:
        return [f"kv has shape {kv.shape}, has to be [layers, 2, blocks, kv heads, block size, head_dim]"]
    if kv.dtype.name not in FLOAT_DTYPES:
        return [f"kv has dtype {kv.dtype.name}, has to be one of {', '.join(FLOAT_DTYPES)}"]
    return []


def _query_problems(q: jax.Array, kv: jax.Array) -> list[str]:
    heads, head_dim = kv.shape[3], kv.shape[5]
    if q.ndim != 3 or q.shape[2] != head_dim or q.dtype != kv.dtype or q.shape[1] % heads or not q.shape[1]:
        want = f"[tokens, a multiple of {heads} kv heads, head_dim {head_dim}] in {kv.dtype.name}"
        return [f"q is {q.dtype.name}{list(q.shape)}, has to be {want}"]
    return []


def _table_problems(block_tables: jax.Array, context_lens: jax.Array, batch: int) -> list[str]:
    width = block_tables.shape[1] if block_tables.ndim == 2 else 0
    problems = _array_problems("block_tables", block_tables, (batch, width), jnp.int32)
    if not problems and not width:
        problems.append("block_tables has width 0, has to hold at least one block a sequence")
    return problems + _array_problems("context_lens", context_lens, (batch,), jnp.int32)


def _array_problems(name: str, array: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> list[str]:
    want = jnp.dtype(dtype)
    if array.shape == shape and array.dtype == want:
        return []
    return [f"{name} is {array.dtype.name}{list(array.shape)}, has to be {want.name}{list(shape)}"]


def _raise(function: str, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"{function}: " + "; ".join(problems))
