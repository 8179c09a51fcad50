"""Backend "mosaic", steps in which decoding rows and prompt chunks meet: two launches, and who does the decoding rows.

The ragged kernel takes a decoding row as an item among others, which costs nothing where its long items leave programs
idle: the chunk of a long prompt often needs one round and a third. Elsewhere decode's own kernel is faster: it reads
keys and values at the memory's rate, and splits a long context, which as an item would be one program's for longer
than all the others need. Which of the two follows from a rough sum of both (`_apart`), once a step; the other launch
then has nothing to do.
"""

import jax
import jax.numpy as jnp

from .decode_triton import attend_among
from .prefill_mosaic import PrefillConfig, num_programs, prefill_config, ragged_attention
from .prefill_mosaic_work import costs, long_loads, work_table

MAX_SPLITS = 8  # of a decoding row's context: bounds the launch's empty programs, 12 us of them for 256 sequences
# Measured on an H200, in the time that a kv tile of a long item takes (1.7 us): a tile of decoding rows alone, in the
# ragged kernel and in decode's, per program; a tile of one split; the launch.
SHORT_TILE, DECODE_TILE, SPLIT_TILE, LAUNCH = 1.6, 1.3, 0.7, 2.0


def mixed_attention(
    q: jax.Array, kv: jax.Array, layer: int | jax.Array, plan: tuple[jax.Array, ...], arrivals: jax.Array, *,
    scale: float, query_tile: int, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`prefill_mosaic.ragged_attention` of plan, and arrivals [B, Hq] as in `decode_triton.decode_attention`."""
    block_tables, context_lens, query_start, tile_seq, tile_start = plan
    config = prefill_config(q.shape[1] // kv.shape[3], q.shape[2], query_tile, num_programs(interpret))
    apart = _apart(work_table(context_lens, query_start, tile_seq, tile_start, query_tile), q.shape[1], config)
    single = query_start[1:] - query_start[:-1] == 1
    tile_seq = jnp.where(apart & single[jnp.maximum(tile_seq, 0)], -1, tile_seq)
    out = ragged_attention(
        q, kv, layer, block_tables, context_lens, query_start, tile_seq, tile_start,
        scale=scale, query_tile=query_tile, interpret=interpret,
    )  # fmt: skip
    return attend_among(
        out, q, kv, layer, block_tables, jnp.where(apart & single, context_lens, 0), query_start[:-1], arrivals,
        scale=scale, max_splits=MAX_SPLITS, interpret=interpret,
    )  # fmt: skip


def _apart(work: jax.Array, num_heads: int, config: PrefillConfig) -> jax.Array:
    """Whether decode's kernel should take a step's decoding rows: both times estimated, in kv tiles of a program."""
    items = num_heads // config.heads
    loads, _ = long_loads(work, items, config.tile, config.num_sms)
    short = jnp.where(work[:, 2] == 1, costs(work, config.tile), 0)
    mean, longest = jnp.sum(short) * (items // config.lanes) / config.num_sms, jnp.max(short)
    together = jnp.maximum(jnp.maximum(jnp.max(loads), longest), jnp.mean(loads) + SHORT_TILE * mean)
    decode = jnp.maximum(DECODE_TILE * mean, SPLIT_TILE * longest / MAX_SPLITS)
    return (mean > 0) & (jnp.max(loads) + decode + LAUNCH < together)
