"""Backend "xla": paged attention in plain jnp, right on every device, for any head_dim, block size and head ratio.

One routine serves decode and ragged steps: N groups of R query rows, each group with one block table, each
row with the number of tokens it may see. It walks the table in chunks with an online softmax (Milakov &
Gimelshein 2018, arXiv:1805.02867) and stops after the longest context of the step (a loop with a dynamic trip
count), so memory is bounded by one chunk of keys and values, whatever the table's width. A chunk is one
gather from the stacked cache with the layer index inside: no slice of a layer is made. A table of a single
chunk needs no loop at all.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .precision import einsum

CHUNK_TOKENS = 128  # context tokens a loop step looks at, if they fit
CHUNK_BYTES = 64 << 20  # bound on one chunk's keys, values and scores
_NO_SCORE = -1e30  # finite: a row that sees nothing ends with sum 0, not with exp(-inf + inf)


def write_kv(kv: jax.Array, layer: int | jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """kv [L, 2, N, Hkv, P, D] with k[t], v[t] [Hkv, D] written at slot slot_mapping[t]; in place when kv is donated.

    Slots outside 0..N*P-1 are dropped. One scatter for keys and values; its targets are unique as long as the
    kept slots are (a dropped token gets an index of its own beyond the end), so a GPU needs no atomics.
    """
    layers, _, num_blocks, _, block_size, _ = kv.shape
    tokens = slot_mapping.shape[0]
    total_blocks = layers * 2 * num_blocks
    keep = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    first = 2 * num_blocks * jnp.asarray(layer, jnp.int32) + jnp.array([[0], [num_blocks]], jnp.int32)
    beyond = total_blocks + jnp.arange(2 * tokens, dtype=jnp.int32).reshape(2, tokens)
    block = jnp.where(keep, first + slot_mapping // block_size, beyond)  # [2, T]: keys, values
    offset = jnp.broadcast_to(jnp.where(keep, slot_mapping % block_size, 0), block.shape)
    flat = kv.reshape(total_blocks, *kv.shape[3:])
    flat = flat.at[block, :, offset].set(jnp.stack([k, v]), mode="drop", unique_indices=True)
    return flat.reshape(kv.shape)


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
    """One query a sequence: q [B, Hq, D], tables [B, W], context_lens [B] (0 gives zeros) -> [B, Hq, D], arrivals."""
    batch, num_heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    rows = q.reshape(batch, kv_heads, num_heads // kv_heads, head_dim)
    visible = jnp.broadcast_to(context_lens[:, None], rows.shape[::2])
    return _attend(rows, kv, layer, block_tables, visible, scale=scale).reshape(q.shape), arrivals


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
    """Causal attention over the tiles of the plan, all tiles at once: q [T, Hq, D] -> [T, Hq, D], pads zero.

    Every tile is padded to min(query_tile, T) queries: the work grows with tiles x context, so a step of
    single-token rows wastes most of it. Memory: the padded queries and outputs, plus one chunk.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    group = num_heads // kv_heads
    width = min(query_tile, tokens)
    seq = jnp.maximum(tile_seq, 0)
    seq_end = query_start[seq + 1]
    tile_end = jnp.where(tile_seq >= 0, jnp.minimum(tile_start + query_tile, seq_end), 0)
    token = tile_start[:, None] + jnp.arange(width, dtype=jnp.int32)  # [NT, width]
    #  position of a token = context_lens - (query tokens from it to its sequence's end)
    visible = context_lens[seq][:, None] - seq_end[:, None] + token + 1
    visible = jnp.where(token < tile_end[:, None], visible, 0)
    rows = q[jnp.minimum(token, tokens - 1)].reshape(-1, width, kv_heads, group, head_dim)
    rows = rows.swapaxes(1, 2).reshape(-1, kv_heads, width * group, head_dim)
    out = _attend(rows, kv, layer, block_tables[seq], jnp.repeat(visible, group, axis=1), scale=scale)
    out = out.reshape(-1, kv_heads, width, group, head_dim)
    tile, found = _tile_of_token(tile_start, tile_end, tokens)
    offset = jnp.where(found, jnp.arange(tokens, dtype=jnp.int32) - tile_start[tile], 0)
    packed = out[tile, :, offset].reshape(q.shape)
    return jnp.where(found[:, None, None], packed, jnp.zeros((), q.dtype))


def _tile_of_token(tile_start: jax.Array, tile_end: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The tile [T] that holds each token and whether one does [T]; the same for every layer, so XLA does it once."""
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    inside = (token >= tile_start) & (token < tile_end)
    return jnp.argmax(inside, axis=1).astype(jnp.int32), jnp.any(inside, axis=1)


def _attend(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """q [N, Hkv, R, D] against the first visible[N, R] tokens of tables [N, W] -> [N, Hkv, R, D] in q's dtype."""
    block_size = kv.shape[4]
    group_visible = jnp.max(visible, axis=1)  # [N]
    blocks = _chunk_blocks(q.shape, kv, tables.shape[1])
    num_chunks = -(-tables.shape[1] // blocks)
    tables = jnp.pad(tables, ((0, 0), (0, num_chunks * blocks - tables.shape[1])))

    def step(index: jax.Array | int, state: tuple[jax.Array, jax.Array, jax.Array]):
        """One chunk of S tokens into (maximum, sum, weighted values) of shapes [N, Hkv, R, 1 | 1 | D]."""
        top, total, acc = state
        ids = lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)
        position = index * blocks * block_size + jnp.arange(blocks * block_size, dtype=jnp.int32)
        keys, values = (_gather(kv, layer, part, ids) for part in (0, 1))
        values = jnp.where((position < group_visible[:, None])[:, None, :, None], values, jnp.zeros((), kv.dtype))
        scores = scale * einsum("nhrd,nhsd->nhrs", q, keys)
        scores = jnp.where((position < visible[:, :, None])[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        fade = jnp.exp(top - new_top)
        total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
        return new_top, total, acc * fade + einsum("nhrs,nhsd->nhrd", weights.astype(kv.dtype), values)

    column = (*q.shape[:3], 1)
    state = jnp.full(column, _NO_SCORE), jnp.zeros(column), jnp.zeros(q.shape, jnp.float32)
    if num_chunks == 1:
        _, total, acc = step(0, state)
    else:
        chunk_tokens = blocks * block_size
        used_chunks = (jnp.max(group_visible) + chunk_tokens - 1) // chunk_tokens
        _, total, acc = lax.fori_loop(0, used_chunks, step, state)
    return (acc / jnp.where(total > 0, total, 1.0)).astype(q.dtype)


def _gather(kv: jax.Array, layer: int | jax.Array, part: int, ids: jax.Array) -> jax.Array:
    """Keys (part 0) or values (1) of blocks ids [N, C] -> [N, Hkv, C * P, D]: one gather, already in the
    dots' order.
    """
    kv_heads, block_size, head_dim = kv.shape[3:]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    tiles = kv.at[layer, part, ids[:, None, :], head].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return tiles.reshape(ids.shape[0], kv_heads, ids.shape[1] * block_size, head_dim)


def _chunk_blocks(q_shape: tuple[int, ...], kv: jax.Array, width: int) -> int:
    """Blocks a chunk holds: about CHUNK_TOKENS, at most CHUNK_BYTES, at least one, at most the table's width."""
    groups, kv_heads, rows, head_dim = q_shape
    block_size = kv.shape[4]
    bytes_per_block = groups * kv_heads * block_size * (2 * head_dim * kv.dtype.itemsize + 4 * rows)
    return max(1, min(width, CHUNK_TOKENS // block_size, CHUNK_BYTES // bytes_per_block))
