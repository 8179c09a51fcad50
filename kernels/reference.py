"""Backend "reference": what paged attention means, in the plainest jnp. For tests and small sizes only.

It gathers every sequence's whole block table and keeps all scores, in float32: memory grows with tokens x
table width x block size. The other backends are compared with it, and it with a float64 numpy oracle. It
reads the packed plan's query_start, never its tiles, so it also checks that the tiles describe the same work.
"""

import jax
import jax.numpy as jnp

from .precision import einsum


def write_kv(kv: jax.Array, layer: int | jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """kv [L, 2, N, Hkv, P, D] with token t's k[t], v[t] at slot slot_mapping[t]; slots outside 0..N*P-1 are dropped."""
    num_blocks, block_size = kv.shape[2], kv.shape[4]
    keep = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    block = jnp.where(keep, slot_mapping // block_size, num_blocks)  # num_blocks is out of range: dropped
    offset = slot_mapping % block_size
    kv = kv.at[layer, 0, block, :, offset].set(k, mode="drop")
    return kv.at[layer, 1, block, :, offset].set(v, mode="drop")


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    arrivals: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * q k^T) v of each query q[b] over the first context_lens[b] tokens of its table; 0 -> zeros."""
    batch, num_heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[3], kv.shape[4]
    context = block_tables.shape[1] * block_size
    pair = kv[layer][:, block_tables]  # [2, B, W, Hkv, P, D]
    pair = jnp.moveaxis(pair, 3, 2).reshape(2, batch, kv_heads, context, head_dim).astype(jnp.float32)
    used = (jnp.arange(context) < context_lens[:, None])[:, None, :, None]
    keys, values = jnp.where(used, pair, 0.0)  # unused slots may hold NaN
    grouped = q.astype(jnp.float32).reshape(batch, kv_heads, num_heads // kv_heads, head_dim)
    scores = scale * einsum("bhgd,bhtd->bhgt", grouped, keys)
    scores = jnp.where(used[:, :, None, :, 0], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True, initial=-1e30))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = einsum("bhgt,bhtd->bhgd", weights / jnp.where(total > 0, total, 1.0), values)
    return out.reshape(q.shape).astype(q.dtype), arrivals


def ragged_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    tile_seq: jax.Array,
    tile_start: jax.Array,
    *,
    scale: float,
    query_tile: int,
) -> jax.Array:
    """Causal attention of packed tokens: each token is a decode row whose context ends with that token; pads
    -> zeros.
    """
    del tile_seq, tile_start, query_tile
    seq, visible = token_contexts(context_lens, query_start, q.shape[0])
    return decode_attention(q, kv, layer, block_tables[seq], visible, visible, scale=scale)[0]


def token_contexts(context_lens: jax.Array, query_start: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The sequence of each packed token and how much context it sees, itself included, int32 [T]; pads: any, 0."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, context_lens.shape[0] - 1)
    #  query_start[seq]        token           query_start[seq + 1]
    #  |-- queries of seq -------|----------------|      the last of them has position context_lens[seq] - 1
    visible = context_lens[seq] - query_start[seq + 1] + token + 1
    return seq, jnp.where(token < query_start[-1], visible, 0)
