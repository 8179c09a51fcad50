"""The two roles of a run in decode_mosaic: the producer, who copies, and the consumer, who computes.

    full[slot], q_full[buffer]   the producer's copies have come     the consumer waits
    free[slot], q_free[buffer]   the consumer has read               the producer waits

Rows of values behind the context may hold NaN, and 0 * NaN is NaN: a tile that has some arrives on a barrier of the
producer's own, who zeroes them and then says full. Rows of keys there need nothing: their scores are replaced.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_tiles import COLUMNS, ROWS, as_operand, copy_pages, online_softmax, page_blocks, store_rows, zero_tail

TILE = 64  # context tokens of a kv tile
RUNS = 2  # of a multiprocessor
STAGES = (3, 2)  # tiles of keys, of values in a run's rings
REGISTERS = (40, 208)  # of a producer's thread, of a consumer's


@dataclass(frozen=True, slots=True)
class Run:
    """What the two warpgroups of a run know: sizes, its number on the multiprocessor and in all, refs and barriers."""

    factor: float  # scale * log2(e)
    num_blocks: int
    kv_heads: int
    group: int
    interpret: bool
    run: jax.Array
    index: jax.Array
    layer: Any  # [1]
    q: Any  # [B, Hq, D]
    kv: Any  # [L * 2 * N * Hkv, P, D]
    tables: Any  # [B, W]
    runs: Any
    walk: Any
    out: Any  # [B, Hq, D]
    parts: Any  # [2 * runs, G, D] float32
    weights: Any  # [2 * runs, 64] float32, base-2 logarithms
    rows: Any  # one memory: wgmma's tiles [RUNS, 2, D / 64, 64, 64], rows of a group, float32 halves of an output
    rings: Any  # keys, values: [RUNS, stages, TILE, D]
    full: Any  # a barrier a slot, and one of the producer's own
    free: Any
    q_full: Any
    q_free: Any
    logs: Any  # [RUNS, 64]
    scratch: Any = None  # [RUNS, 64, TILE], the interpreter's

    @property
    def chunks(self) -> range:
        return range(self.q.shape[2] // COLUMNS)

    def slot(self, part: int, count) -> jax.Array:
        return lax.rem(count, STAGES[part])

    def full_at(self, part: int, slot):
        return self.full[part].at[self.run * (STAGES[part] + 1) + slot]

    def free_at(self, part: int, slot):
        return self.free[part].at[self.run * STAGES[part] + slot]

    def each_piece(self, work) -> tuple[jax.Array, jax.Array]:
        """Calls work(pieces so far, tiles so far, seq, head, context, first tile, tiles); returns pieces and tiles."""
        seq, head, tile, size = (self.runs[self.index, i] for i in range(4))

        def body(state):
            left, pieces, done, seq, head, tile = state
            context, following = self.walk[seq, 0], self.walk[seq, 1]
            count = jnp.minimum(lax.div(context + (TILE - 1), TILE) - tile, left)
            work(pieces, done, seq, head, context, tile, count)
            next_head = head + 1
            over = next_head == self.kv_heads
            seq = jnp.where(over, following, seq)
            return left - count, pieces + 1, done + count, seq, jnp.where(over, 0, next_head), jnp.int32(0)

        state = size, jnp.int32(0), jnp.int32(0), seq, head, tile
        _, pieces, done, *_ = lax.while_loop(lambda state: state[0] > 0, body, state)
        return pieces, done


def produce(p: Run) -> None:
    """Queries, keys and values of every piece, as far ahead as there is room."""
    plgpu.set_max_registers(REGISTERS[0], action="decrease")
    block_size, layer = p.kv.shape[1], p.layer[0]

    def work(pieces, done, seq, head, context, first_tile, count):
        buffer = lax.rem(pieces, 2)
        pl.when(pieces >= 2)(lambda: plgpu.barrier_wait(p.q_free.at[p.run * 2 + buffer]))
        own = pl.ds(0, p.group)
        for c in p.chunks:
            source = p.q.at[seq, pl.ds(head * p.group, p.group), pl.ds(c * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, p.rows[1].at[p.run, buffer, c, 0, own], p.q_full.at[p.run * 2 + buffer])
        last_block = lax.div(context - 1, block_size)

        def step(index, _):
            start = (first_tile + index) * TILE
            blocks = page_blocks(p.tables, seq, start, last_block, tile=TILE, block_size=block_size)
            for part in (0, 1):
                slot = p.slot(part, done + index)
                pl.when(done + index >= STAGES[part])(
                    lambda part=part, slot=slot: plgpu.barrier_wait(p.free_at(part, slot))
                )
                partial = (context < start + TILE) & (part == 1)
                full = p.full_at(part, jnp.where(partial, STAGES[part], slot))
                base = (2 * layer + part) * p.num_blocks
                copy_pages(p.kv, base, blocks, p.kv_heads, head, start, p.rings[part].at[p.run, slot], full)

        lax.fori_loop(0, count, step, None)
        end = (first_tile + count) * TILE

        @pl.when(context < end)  # 0 * NaN is NaN: rows of values behind the context may hold anything
        def _():
            slot = p.slot(1, done + count - 1)
            copied, full, pages = p.full_at(1, STAGES[1]), p.full_at(1, slot), max(1, TILE // block_size)
            zero_tail(p.rings[1].at[p.run, slot], context - (end - TILE), copied, full, pages)

    pieces, done = p.each_piece(work)
    for part in (0, 1):  # every completion of a barrier has to be awaited

        def drain(count, _, part=part):
            plgpu.barrier_wait(p.free_at(part, p.slot(part, count)))

        lax.fori_loop(jnp.maximum(done - STAGES[part], 0), done, drain, None)
    lax.fori_loop(
        jnp.maximum(pieces - 2, 0),
        pieces,
        lambda piece, _: plgpu.barrier_wait(p.q_free.at[p.run * 2 + lax.rem(piece, 2)]),
        None,
    )


def consume(p: Run) -> None:
    """Attention of every piece of the run."""
    plgpu.set_max_registers(REGISTERS[1], action="increase")
    p.each_piece(functools.partial(_attend, p))


def _attend(p: Run, pieces, done, seq, head, context, first_tile, count) -> None:
    head_dim, interpret, (keys, values) = p.q.shape[2], p.interpret, p.rings
    buffer = lax.rem(pieces, 2)
    tiles, heads, halves = (ref.at[p.run, buffer] for ref in p.rows)
    plgpu.barrier_wait(p.q_full.at[p.run * 2 + buffer])
    if interpret:  # elsewhere the refs are one memory
        for c in p.chunks:
            tiles.at[c, pl.ds(0, ROWS)][...] = jnp.zeros((ROWS, COLUMNS), p.q.dtype)
            for g in range(p.group):
                tiles.at[c, g][...] = heads[c, 0, g]
        plgpu.commit_smem()
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)

    def step(index, state):
        out, top, total = state
        slots = [p.slot(part, done + index) for part in (0, 1)]

        def product_of_queries(acc):
            for c in p.chunks:
                chunk = keys.at[p.run, slots[0], :, pl.ds(c * COLUMNS, COLUMNS)]
                plgpu.wgmma(acc, tiles.at[c], chunk.transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc)

        plgpu.barrier_wait(p.full_at(0, slots[0]))
        scores = pl.run_scoped(product_of_queries, plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32))
        plgpu.barrier_arrive(p.free_at(0, slots[0]))
        scores = jnp.where(column < context - (first_tile + index) * TILE, scores, -jnp.inf)
        weights, top, total, fade = online_softmax(scores, p.factor, (top, total))
        out = out * lax.broadcast_in_dim(fade, out.shape, [0])
        weights = as_operand(weights, p.q.dtype)

        def product_of_values(acc):
            operand = weights
            if interpret:
                p.scratch.at[p.run][...] = weights
                plgpu.commit_smem()
                operand = p.scratch.at[p.run]
            else:
                acc[...] = out
            plgpu.wgmma(acc, operand, values.at[p.run, slots[1]])
            new = plgpu.wgmma_accumulator_load(acc)
            return new + out if interpret else new

        plgpu.barrier_wait(p.full_at(1, slots[1]))
        out = pl.run_scoped(product_of_values, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32))
        plgpu.barrier_arrive(p.free_at(1, slots[1]))
        return out, top, total

    top, total = (
        plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        for value in (-jnp.inf, 0.0)
    )
    state = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA), top, total
    out, top, total = lax.fori_loop(0, count, step, state)
    out *= lax.broadcast_in_dim(1.0 / total, out.shape, [0])
    whole = (first_tile == 0) & (count * TILE >= context)

    @pl.when(whole)
    def _():
        for c in p.chunks:
            part = out[:, c * COLUMNS : (c + 1) * COLUMNS].astype(p.out.dtype)
            if interpret:
                heads.at[c, 0, pl.ds(0, p.group)][...] = part[: p.group]
            else:
                tiles.at[c][...] = part
        plgpu.commit_smem()
        for c in p.chunks:
            where = seq, pl.ds(head * p.group, p.group), pl.ds(c * COLUMNS, COLUMNS)
            plgpu.copy_smem_to_gmem(heads.at[c, 0, pl.ds(0, p.group)], p.out.at[where])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(jnp.logical_not(whole))
    def _():
        slot = 2 * p.index + jnp.where(first_tile > 0, 0, 1)
        p.logs.at[p.run][...] = top + jnp.log2(total)
        half = head_dim // 2
        for i in (0, 1):
            store_rows(halves, out[:, i * half : (i + 1) * half])
            plgpu.commit_smem()
            where = slot, pl.ds(0, p.group), pl.ds(i * half, half)
            plgpu.copy_smem_to_gmem(halves.at[pl.ds(0, p.group)], p.parts.at[where])
            if i == 0:
                plgpu.copy_smem_to_gmem(p.logs.at[p.run], p.weights.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.barrier_arrive(p.q_free.at[p.run * 2 + buffer])
