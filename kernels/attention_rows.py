"""Backends "xla" and "reference", ragged steps of a batch-invariant engine: attention of one query after the other.

Each token is a decode row whose context ends with it, computed by a loop body that never sees another row.
"""

import functools

import jax
import jax.numpy as jnp

from . import xla
from .reference import token_contexts
from .rows import by_row


def invariant_attention(
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
    """As `ragged_attention`: q [T, Hq, D] -> [T, Hq, D], pads zero. The tiles aren't used."""
    del tile_seq, tile_start, query_tile
    seq, visible = token_contexts(context_lens, query_start, q.shape[0])
    attend = functools.partial(xla.decode_attention, scale=scale)
    # whole chunks, and more than one of them: the walk over a context doesn't depend on the table's width either
    chunk = max(1, xla.CHUNK_TOKENS // kv.shape[4])
    width = max(2, -(-block_tables.shape[1] // chunk)) * chunk
    block_tables = jnp.pad(block_tables, ((0, 0), (0, width - block_tables.shape[1])))

    def one(row: jax.Array, table: jax.Array, context: jax.Array) -> jax.Array:
        return attend(row, kv, layer, table, context, jnp.zeros((1, q.shape[1]), jnp.int32))[0]

    return by_row(one)(q, block_tables[seq], visible)
