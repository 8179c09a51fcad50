"""Backend "triton", decode: paged attention of one query a sequence, split over the context.

Work of one program: one kv head of one sequence and one split of its context. The G query heads that share
the kv head are the rows of the dots, padded to 16 (the smallest dot), so every key and value is read once. A
tile is whole rows of a (block, head) tile of the cache, [tile, D] contiguous elements.

    context of a sequence   |-- tile --|-- tile --|-- tile --|-- tile --|-- part |
    split (of 2)            0                                1                      by its own length

Memory traffic: each key and value below context_lens once, q and the output once; with S > 1 splits 2 * S
float32 rows of D a query head more, and a second launch that combines them ("Flash-Decoding", Dao et al. 2023).
Supported: head_dim a power of two 16..256, any block size and head ratio, float32 and bfloat16, lengths 0..W*P.
Accumulates in float32; with a bfloat16 cache the softmax weights are rounded to bfloat16 for the second dot.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .device import num_sms
from .triton_tiles import (
    LOG2_E,
    MIN_DOT,
    as_rows,
    dot,
    load_kv_tile,
    next_power_of_two,
    online_softmax_step,
)

MAX_ROWS = 64  # query heads of one program; a larger group is dealt to several
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tunables: splits of a context (a power of two), context tokens a tile, Triton's warps and pipeline stages."""

    num_splits: int
    tile: int
    num_warps: int
    num_stages: int


def decode_config(
    batch: int, kv_heads: int, head_dim: int, block_size: int, width: int, itemsize: int, sms: int
) -> DecodeConfig:
    """The untuned default: PROGRAMS_PER_SM programs a multiprocessor if that leaves a split two tiles of the table."""
    tile = 32 if itemsize == 4 else 128 if block_size % 128 == 0 else 64
    while tile > MIN_DOT and tile * head_dim * itemsize > 32 << 10:  # one stage of keys in shared memory
        tile //= 2
    most = max(1, width * block_size // (2 * tile))
    wanted = max(1, PROGRAMS_PER_SM * sms // (batch * kv_heads))
    splits = min(MAX_SPLITS, most, wanted)
    return DecodeConfig(num_splits=1 << (splits.bit_length() - 1), tile=tile, num_warps=2, num_stages=2)


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q [B, Hq, D], kv [L, 2, N, Hkv, P, D], block_tables [B, W], context_lens [B] -> [B, Hq, D]; length 0 -> zeros."""
    batch, num_heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[3:5]
    if config is None:
        width, itemsize = block_tables.shape[1], kv.dtype.itemsize
        config = decode_config(batch, kv_heads, head_dim, block_size, width, itemsize, num_sms())
    group = num_heads // kv_heads
    rows = min(MAX_ROWS, max(MIN_DOT, next_power_of_two(group)))
    splits = config.num_splits
    if splits == 1:
        out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    else:
        part = (batch, num_heads, splits)
        out_shape = [
            jax.ShapeDtypeStruct((*part, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ]
    kernel = functools.partial(_decode_kernel, scale=scale, group=group, rows=rows, config=config)
    out = pl.pallas_call(
        kernel,
        grid=(kv_heads * pl.cdiv(group, rows), splits, batch),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(jnp.asarray(layer, jnp.int32).reshape(1), q, as_rows(kv), block_tables, context_lens)
    if splits == 1:
        return out[0]
    parts, log_weights = out
    return _combine(parts, log_weights, q.dtype, interpret=interpret)


def _decode_kernel(
    layer_ref,
    q_ref,
    kv_ref,
    tables_ref,
    lens_ref,
    *out_refs,
    scale: float,
    group: int,
    rows: int,
    config: DecodeConfig,
):
    head_block, split, seq = (pl.program_id(i) for i in range(3))
    blocks_per_group = pl.cdiv(group, rows)
    head = lax.div(head_block, blocks_per_group)
    row_in_group = lax.rem(head_block, blocks_per_group) * rows
    tile, head_dim = config.tile, q_ref.shape[2]
    #  rows of this program: query heads first_row .. first_row + rows - 1, those of the group kept by the mask
    first_row = head * group + row_in_group
    kept = row_in_group + lax.iota(jnp.int32, rows) < group
    q = plgpu.load(q_ref.at[seq, pl.ds(first_row, rows), :], mask=kept[:, None], other=0.0)

    context = lens_ref[seq]
    num_tiles = pl.cdiv(context, tile)
    tiles_per_split = pl.cdiv(num_tiles, config.num_splits)
    first_tile = split * tiles_per_split
    last_tile = jnp.minimum(first_tile + tiles_per_split, num_tiles)
    layer = layer_ref[0]

    def step(index, state):
        start = index * tile
        keys, values = load_kv_tile(kv_ref, tables_ref, layer, seq, head, start, context, tile=tile)
        scores = dot(q, keys, trans_b=True) * (scale * LOG2_E)
        position = start + lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        scores = jnp.where(position < context, scores, -jnp.inf)
        return online_softmax_step(state, scores, values)

    state = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, head_dim), jnp.float32),
    )
    top, total, acc = lax.fori_loop(first_tile, last_tile, step, state)
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    if config.num_splits == 1:
        (out_ref,) = out_refs
        plgpu.store(out_ref.at[seq, pl.ds(first_row, rows), :], out.astype(out_ref.dtype), mask=kept[:, None])
        return
    part_ref, weight_ref = out_refs
    log_weight = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    plgpu.store(part_ref.at[seq, pl.ds(first_row, rows), split, :], out, mask=kept[:, None])
    plgpu.store(weight_ref.at[seq, pl.ds(first_row, rows), split], log_weight, mask=kept)


def _combine(parts: jax.Array, log_weights: jax.Array, dtype: jax.typing.DTypeLike, *, interpret: bool) -> jax.Array:
    """Mean of parts [B, Hq, S, D] under base-2 log weights [B, Hq, S] (all -inf: zeros) -> [B, Hq, D] in dtype."""
    batch, num_heads, splits, head_dim = parts.shape
    num_warps = min(8, max(1, splits * head_dim // 1024))
    return pl.pallas_call(
        _combine_kernel,
        grid=(num_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, head_dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(parts, log_weights)


def _combine_kernel(parts_ref, log_weights_ref, out_ref):
    head, seq = pl.program_id(0), pl.program_id(1)
    log_weights = log_weights_ref[seq, head, :]
    top = jnp.maximum(jnp.max(log_weights), -1e30)  # finite also for an empty context
    weights = jnp.exp2(log_weights - top)
    total = jnp.sum(weights)
    out = jnp.sum(parts_ref[seq, head, :, :] * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    out_ref[seq, head, :] = out.astype(out_ref.dtype)
