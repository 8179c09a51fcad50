"""What a warpgroup of the Mosaic kernels does with one tile in registers or shared memory.

Scores and weights are [64, tile] in wgmma's layout: a row lies in four neighbouring threads. Memory that a wgmma or
a copy reads next needs `commit_smem` after the stores here; the caller says when.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # what one wgmma takes
COLUMNS = 64  # of a copy: 128 bytes, the swizzle
# wgmma's tiles in shared memory (pyright takes a method of jax's protocol for one to be written here)
TRANSFORMS = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


def store_rows(ref, values: jax.Array) -> None:
    """Values in wgmma's layout into untiled shared memory, though some threads meet in a bank.

    From jax 0.12 on that has to be asked for; before, there is no other way to store.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = values


def causal(scores: jax.Array, position, heads: int) -> jax.Array:
    """The scores, -inf where a key lies behind the query.

    Row r is token r // heads; token 0 has its own key in column `position`, which may lie outside the tile.
    """
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    token = row if heads == 1 else lax.shift_right_logical(row, heads.bit_length() - 1)
    return jnp.where(column - token <= position, scores, -jnp.inf)


def online_softmax(scores: jax.Array, factor: float, state):
    """(weights [64, tile], maximum [64], sum [64], factor of what was summed before), in base 2.

    factor is scale * log2(e); state the (maximum, sum) of the tiles before or None. Every row sees the first key, so
    the maximum is finite from the first tile on.
    """
    top = jnp.max(scores, axis=1) * factor
    if state is not None:
        top = jnp.maximum(top, state[0])
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, scores.shape, [0]))
    total = jnp.sum(weights, axis=1)
    if state is None:
        return weights, top, total, total
    fade = jnp.exp2(state[0] - top)
    return weights, top, state[1] * fade + total, fade


def as_operand(weights: jax.Array, dtype) -> jax.Array:
    """In the dtype of wgmma's other operand, converted here and neither earlier nor later."""
    return lax.optimization_barrier(lax.optimization_barrier(weights).astype(dtype))


def page_blocks(tables_ref, seq, first, last_block, *, tile: int, block_size: int) -> list:
    """The blocks of a kv tile's pages, from context token `first` on.

    Behind the context it is the last block again, never a stale entry. Read it before a wait: global memory is slow.
    """
    first_block = lax.div(first, block_size)
    return [tables_ref[seq, jnp.minimum(first_block + i, last_block)] for i in range(max(1, tile // block_size))]


def copy_pages(kv_ref, base, blocks, kv_heads: int, head, first, ring_ref, full) -> None:
    """One kv head's pages of `blocks` to ring_ref [tile, D], each arriving at barrier `full`.

    kv_ref [rows, P, D]: block b's heads are the rows from (base + b) * kv_heads on. first: the tile's first token.
    """
    tile, block_size = ring_ref.shape[0], kv_ref.shape[1]
    page = min(tile, block_size)
    rows = pl.ds(lax.rem(first, block_size) if block_size > page else 0, page)
    for i, block in enumerate(blocks):
        source = kv_ref.at[(base + block) * kv_heads + head, rows]
        plgpu.copy_gmem_to_smem(source, ring_ref.at[pl.ds(i * page, page)], full)


def zero_tail(ring_ref, used, copied, full, pages: int) -> None:
    """A partial tile of values: awaits its pages at `copied`, zeroes its rows from `used` on, and says `full`."""
    plgpu.barrier_wait(copied)
    zero_rows(ring_ref, used)
    plgpu.commit_smem()
    for _ in range(pages):
        plgpu.barrier_arrive(full)


def zero_rows(ring_ref, used) -> None:
    """Zeros in the rows of a kv tile [tile, D] from row `used` on."""
    for first in range(0, ring_ref.shape[0], ROWS):

        @pl.when(used < first + ROWS)
        def _(first=first):
            for c in range(0, ring_ref.shape[1], COLUMNS):
                ref = ring_ref.at[pl.ds(first, ROWS), pl.ds(c, COLUMNS)]
                row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
                values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
                ref[...] = jnp.where(row < used - first, values, jnp.zeros((), values.dtype))


def store_tokens(tokens_ref, out_ref, token, count, first_head) -> None:
    """tokens_ref [D / 64, 64 / heads, heads, 64] to `count` tokens from `token` on, in copies of 64, 32, ... 1 tokens.

    So no token of the next sequence is written.
    """
    chunks, size, heads, columns = tokens_ref.shape
    while size:
        if size <= out_ref.shape[0]:

            @pl.when(lax.rem(lax.div(count, size), 2) == 1)
            def _(size=size):
                done = count - lax.rem(count, 2 * size)
                for c in range(chunks):
                    where = pl.ds(token + done, size), pl.ds(first_head, heads), pl.ds(c * columns, columns)
                    plgpu.copy_smem_to_gmem(tokens_ref.at[c, pl.ds(done, size)], out_ref.at[where])

        size //= 2


def zeroes_pads(num_heads: int, head_dim: int) -> bool:
    """Whether a warpgroup of 128 threads can store one token's output: 8 bytes a thread, or less, a number each."""
    size = num_heads * head_dim
    return size % 512 == 0 if size >= 512 else size % 128 == 0


def zero_pads(out_ref, starts_ref, sm, num_sms: int) -> None:
    """Zeros in this program's share of the tokens behind the last query; not where `zeroes_pads` says no."""
    tokens, num_heads, head_dim = out_ref.shape
    if not zeroes_pads(num_heads, head_dim):
        return
    first = starts_ref[starts_ref.shape[0] - 1] + sm

    def body(index, _):
        out_ref.at[first + index * num_sms][...] = jnp.zeros((num_heads, head_dim), out_ref.dtype)

    lax.fori_loop(0, lax.div(jnp.maximum(tokens - first, 0) + (num_sms - 1), num_sms), body, None)
