"""What the Triton-style kernels share: tile loads from the paged cache and dots.

A kv tile is `tile` consecutive context tokens of one sequence and one kv head. Two ways to load it:

    tile divides the block size    one table entry, then `tile` contiguous rows of the (block, head) tile
    otherwise                      a table entry per token: any block size, shorter contiguous runs

The kernels see the cache as [L * 2, N, Hkv, P, D] (`as_rows`, a free reshape): row 2 * layer holds keys, the
next values. Unused slots may hold NaN, and 0 * NaN is NaN: a tile that reaches beyond the sequence is loaded
under a mask. jax's Triton lowering is deprecated since 0.11; this folder's other backends don't depend on
this file.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .precision import dot_precision

MIN_DOT = 16  # Triton's dot wants at least 16 rows, columns and inner elements


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """a [M, K] times b [K, N] (or b [N, K] with trans_b) -> float32 [M, N]; float32 operands without TF32."""
    return plgpu.dot(a, b, trans_b=trans_b, precision=dot_precision(a.dtype))


def as_rows(kv: jax.Array) -> jax.Array:
    """kv [L, 2, N, Hkv, P, D] as [L * 2, N, Hkv, P, D]."""
    return kv.reshape(-1, *kv.shape[2:])


def load_kv_tile(kv_ref, tables_ref, layer, seq, head, start, limit, *, tile: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values [tile, D] of context tokens start..start+tile-1 of one sequence and kv head.

    `start` is a multiple of tile. Tokens >= limit come as zeros; limit None: all of them are in use, no mask.
    """
    block_size, head_dim = kv_ref.shape[3:]
    shape = (tile, head_dim)
    if block_size % tile == 0:
        block = tables_ref[seq, lax.div(start, block_size)]
        offset = 0 if tile == block_size else lax.rem(start, block_size)
        index = (block, head, pl.ds(offset, tile), slice(None))
    else:
        token = start + lax.iota(jnp.int32, tile)
        entry = tables_ref.at[jnp.broadcast_to(seq, token.shape), lax.div(token, block_size)]
        block = plgpu.load(entry) if limit is None else plgpu.load(entry, mask=token < limit, other=0)
        slot = lax.rem(token, block_size)
        block, slot = (jnp.broadcast_to(x[:, None], shape) for x in (block, slot))
        index = (block, head, slot, lax.broadcasted_iota(jnp.int32, shape, 1))
    refs = [kv_ref.at[(2 * layer + part, *index)] for part in (0, 1)]
    if limit is None:
        keys, values = (plgpu.load(ref) for ref in refs)
    else:
        used = start + lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < limit
        keys, values = (plgpu.load(ref, mask=used, other=0.0) for ref in refs)
    return keys, values


def online_softmax_step(state, scores: jax.Array, values: jax.Array):
    """(maximum [M], sum [M], weighted values [M, D]) after base-2 scores [M, tile] of values [tile, D].

    Every row must have seen at least one finite score by its first step, so the maximum is finite.
    """
    top, total, acc = state
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_top[:, None])
    fade = jnp.exp2(top - new_top)
    total = total * fade + jnp.sum(weights, axis=1)
    return new_top, total, acc * fade[:, None] + dot(weights.astype(values.dtype), values)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()
