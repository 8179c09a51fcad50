"""Backend "triton", decode: paged attention of one query a sequence, split over the context, in one launch.

Work of one program: one kv head of one sequence and one split of its context. The G query heads that share
the kv head are the rows of the dots, padded to 16 (the smallest dot), so every key and value is read once. A
tile is whole rows of a (block, head) tile of the cache, [tile, D] contiguous elements.

    long context    |-- tile --|-- tile --|-- tile --|-- tile --|-- tile --|-- part |
    its 3 splits    0                     1                     2
    short context   |-- tile --|-- part |
    its one split   0

How many splits a context gets follows from its length and the step's total (`tokens_per_split`): enough programs to
fill the chip and to even out long and short contexts, and no more. A context of one split writes its output directly;
of several, each leaves a float32 part, and the last program to arrive combines them ("Flash-Decoding", Dao et al. 2023,
without its second launch): in the order of the splits, so the result doesn't depend on who came last.

Memory traffic: each key and value below context_lens once, q and the output once; a context of s > 1 splits
2 * s float32 rows of D a query head more (they stay in L2).
Supported: head_dim a power of two 16..256, any block size and head ratio, float32 and bfloat16, lengths 0..W*P.
Accumulates in float32; with a bfloat16 cache the softmax weights are rounded to bfloat16 for the second dot.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import decode_table
from .decode_triton_parts import combine
from .device import device_kind, num_sms
from .precision import LOG2_E
from .triton_tiles import (
    MIN_DOT,
    as_rows,
    dot,
    load_kv_tile,
    next_power_of_two,
    online_softmax_step,
)

MAX_ROWS = 64  # query heads of one program; a larger group is dealt to several
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tunables of a shape; see `decode_table.DecodeRow` for the others.

    max_splits   of a context, a power of two: the grid, and the room for parts
    programs     wanted in the launch as a whole: (contexts of about one length, mixed lengths)
    """

    max_splits: int
    programs: tuple[int, int]
    min_tokens: int
    tile: int
    num_warps: int
    num_stages: int
    fused: bool = True


def decode_config(
    batch: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    width: int,
    itemsize: int,
    sms: int,
    kind: str = decode_table.DEFAULT,
) -> DecodeConfig:
    """The measured default for a shape: the table's row, and a tile that fits blocks and shared memory."""
    pairs = batch * kv_heads
    row = decode_table.row_for(pairs, kind)
    tile = min(row.tile, 32) if itemsize == 4 else row.tile
    while tile > MIN_DOT and tile * head_dim * itemsize > 32 << 10:  # one stage of keys in shared memory
        tile //= 2
    programs = row.programs[0] * sms, row.programs[1] * sms
    room = max(1, max(programs) // pairs, width * block_size // 1024)
    most = next_power_of_two(pl.cdiv(width * block_size, tile))
    splits = min(MAX_SPLITS, most, 1 << (room.bit_length() - 1))
    return DecodeConfig(splits, programs, row.min_tokens, tile, row.num_warps, row.num_stages, row.fused)


def tokens_per_split(context_lens: jax.Array, heads: int, config: DecodeConfig) -> jax.Array:
    """int32 [1]: the context tokens of one program, a multiple of the tile, so that the launch has config.programs.

    Contexts of about one length (none 1.25 times the mean) end together anyway, so they take fewer and longer splits.
    The same for every layer of a step: XLA computes it once.
    """
    total = jnp.sum(context_lens)
    even = 4 * jnp.max(context_lens) * jnp.sum(context_lens > 0) <= 5 * total
    programs = jnp.where(even, *config.programs)
    tokens = jnp.maximum(pl.cdiv(total * heads, programs), config.min_tokens)
    return (pl.cdiv(tokens, config.tile) * config.tile).astype(jnp.int32).reshape(1)


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    arrivals: jax.Array,
    *,
    scale: float,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """q [B, Hq, D], kv [L, 2, N, Hkv, P, D], tables [B, W], lens, arrivals [B, Hq] zeros -> ([B, Hq, D], zeros)."""
    config = config or _measured_config(kv, block_tables)
    return _launch(q, kv, layer, block_tables, context_lens, arrivals, (), scale, config, interpret)


def attend_among(
    out: jax.Array, q: jax.Array, kv: jax.Array, layer: int | jax.Array, block_tables: jax.Array,
    context_lens: jax.Array, tokens: jax.Array, arrivals: jax.Array, *, scale: float, max_splits: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`decode_attention` of some rows of q [T, Hq, D], written into out [T, Hq, D] in place -> (out, zeros).

    Sequence b's query is row tokens[b] of both; context 0: nothing of it is read or written. max_splits: bounds the
    launch, most of whose programs have nothing to do.
    """
    config = _measured_config(kv, block_tables)
    config = replace(config, max_splits=min(config.max_splits, max_splits), fused=True)
    return _launch(q, kv, layer, block_tables, context_lens, arrivals, (tokens, out), scale, config, interpret)


def _measured_config(kv: jax.Array, block_tables: jax.Array) -> DecodeConfig:
    kv_heads, block_size, head_dim = kv.shape[3:]
    batch, width = block_tables.shape
    return decode_config(batch, kv_heads, head_dim, block_size, width, kv.dtype.itemsize, num_sms(), device_kind())


def _launch(
    q, kv, layer, block_tables, context_lens, arrivals, among: tuple, scale: float, config: DecodeConfig, interpret
) -> tuple[jax.Array, jax.Array]:
    """among: `attend_among`'s (tokens, out), or nothing."""
    num_heads, head_dim = q.shape[1:]
    batch, kv_heads = block_tables.shape[0], kv.shape[3]
    group = num_heads // kv_heads
    rows = min(MAX_ROWS, max(MIN_DOT, next_power_of_two(group)))
    head_blocks = kv_heads * pl.cdiv(group, rows)
    part = (batch, num_heads, config.max_splits)
    split_tokens = tokens_per_split(context_lens, kv_heads, config)
    kernel = _among_kernel if among else _decode_kernel
    out, arrivals, *parts = pl.pallas_call(
        functools.partial(kernel, scale=scale, group=group, rows=rows, config=config, interpret=interpret),
        grid=(head_blocks, batch, config.max_splits),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype),
            jax.ShapeDtypeStruct((*part, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        input_output_aliases={6: 1, 8: 0} if among else {6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode_among" if among else "paged_decode",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        split_tokens,
        q,
        as_rows(kv),
        block_tables,
        context_lens,
        arrivals,
        *among,
    )
    if not config.fused and config.max_splits > 1:
        out = pl.pallas_call(
            functools.partial(_combine_kernel, config=config),
            grid=(num_heads, batch),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
            interpret=interpret,
            name="paged_decode_combine",
        )(split_tokens, context_lens, *parts)
    return out, arrivals


def _among_kernel(*refs, **options):
    *inputs, tokens_ref, _ = refs[:9]
    _decode_kernel(*inputs, *refs[9:], tokens_ref=tokens_ref, **options)


def _decode_kernel(
    layer_ref,
    split_tokens_ref,
    q_ref,
    kv_ref,
    tables_ref,
    lens_ref,
    _,
    out_ref,
    arrivals_ref,
    part_ref,
    weight_ref,
    *,
    tokens_ref=None,
    scale: float,
    group: int,
    rows: int,
    config: DecodeConfig,
    interpret: bool,
):
    head_block, seq, split = (pl.program_id(i) for i in range(3))
    blocks_per_group = pl.cdiv(group, rows)
    head = lax.div(head_block, blocks_per_group)
    row_in_group = lax.rem(head_block, blocks_per_group) * rows
    tile, head_dim = config.tile, q_ref.shape[2]
    #  rows of this program: query heads first_row .. first_row + rows - 1, those of the group kept by the mask
    first_row = head * group + row_in_group
    kept = row_in_group + lax.iota(jnp.int32, rows) < group

    context = lens_ref[seq]
    token, has_work = (seq, True) if tokens_ref is None else (tokens_ref[seq], context > 0)
    num_tiles = pl.cdiv(context, tile)
    num_splits, tiles_per_split = _splits(context, split_tokens_ref[0], config)
    first_tile = split * tiles_per_split
    last_tile = jnp.minimum(first_tile + tiles_per_split, num_tiles)
    layer = layer_ref[0]

    @pl.when((split < num_splits) & has_work)
    def _attend():
        q = plgpu.load(q_ref.at[token, pl.ds(first_row, rows), :], mask=kept[:, None], other=0.0)

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

        if not config.fused and config.max_splits > 1:
            log_weight = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
            plgpu.store(part_ref.at[seq, pl.ds(first_row, rows), split, :], out, mask=kept[:, None])
            plgpu.store(weight_ref.at[seq, pl.ds(first_row, rows), split], log_weight, mask=kept)
            return

        @pl.when(num_splits == 1)
        def _whole():
            plgpu.store(out_ref.at[token, pl.ds(first_row, rows), :], out.astype(out_ref.dtype), mask=kept[:, None])

        @pl.when(num_splits > 1)
        def _part():
            plgpu.store(part_ref.at[seq, pl.ds(first_row, rows), split, :], out, mask=kept[:, None])
            plgpu.store(weight_ref.at[seq, pl.ds(first_row, rows), split], top + jnp.log2(total), mask=kept)
            if not interpret:  # there, a program is one thread
                plgpu.debug_barrier()  # every thread's part is written before the one that counts the program in
            before = plgpu.atomic_add(arrivals_ref, (seq, head_block), jnp.full((), 1, jnp.int32))

            @pl.when(before == num_splits - 1)
            def _last():
                write = functools.partial(
                    combine, out_ref, token, part_ref, weight_ref, seq, num_splits, config.max_splits
                )
                if group <= 8:  # unrolled: the loads of all heads are in flight together
                    for index in range(group):
                        write(first_row + index)
                else:
                    heads = jnp.minimum(group - row_in_group, rows)
                    lax.fori_loop(0, heads, lambda index, _: write(first_row + index), None)
                arrivals_ref[seq, head_block] = 0


def _splits(context, split_tokens, config: DecodeConfig):
    """How many splits a context has, none of them empty, and the tiles of each."""
    num_tiles = pl.cdiv(context, config.tile)
    num_splits = jnp.clip(pl.cdiv(context, split_tokens), 1, config.max_splits)
    tiles_per_split = pl.cdiv(num_tiles, num_splits)
    return jnp.maximum(pl.cdiv(num_tiles, jnp.maximum(tiles_per_split, 1)), 1), tiles_per_split


def _combine_kernel(split_tokens_ref, lens_ref, part_ref, weight_ref, out_ref, *, config: DecodeConfig):
    query_head, seq = pl.program_id(0), pl.program_id(1)
    num_splits, _ = _splits(lens_ref[seq], split_tokens_ref[0], config)
    combine(out_ref, seq, part_ref, weight_ref, seq, num_splits, config.max_splits, query_head)
