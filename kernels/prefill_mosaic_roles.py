"""The two roles in a program of prefill_mosaic: the producer, who copies, and the consumers, who compute.

Who waits for whom, each barrier as often as it completes:

    q_full[place], k_full[slot], v_full[slot]   the producer's copies have come          consumers wait
    q_free[place], k_free[slot], v_free[slot]   all consumers have read                  the producer waits
    turns[consumer]                             the consumer before has issued its products

Rows of values behind the context may hold NaN, and 0 * NaN is NaN: a tile that has some arrives on a barrier of the
producer's own, who zeroes them and then says v_full. Rows of keys there need nothing: their scores are replaced.

ptxas orders a wgmma pipeline as the source does only if it must, so three places have to stay as they are (read the
SASS after a change: HGMMA 8 + 8, DEPBAR 1, the softmax, DEPBAR 0, and no message C7513 or C7519):

    waits on barriers come before the accumulators, so that no branch divides fence and wgmma
    the weights become bfloat16 after PV's wait, since a wgmma in flight still reads the registers of the last ones
    the row sums are stored before PV's wait, since a softmax of nothing but registers would be moved behind it
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_tiles import (
    COLUMNS,
    ROWS,
    as_operand,
    causal,
    copy_pages,
    online_softmax,
    page_blocks,
    store_tokens,
    zero_pads,
    zero_tail,
)
from .prefill_mosaic_program import Program

REGISTERS = {1: None, 2: (24, 240), 3: (32, 160)}  # by consumers: of a producer's thread, of a consumer's


def produce(program: Program) -> None:
    """The producer: queries, keys and values of every item, as far ahead as the rings have room."""
    p, config = program, program.config
    if registers := REGISTERS[p.num_consumers]:
        plgpu.set_max_registers(registers[0], action="decrease")
    tile, stages, block_size = config.tile, config.num_stages, p.kv.shape[1]
    layer = p.layer[0]

    def copy_queries(place, start, count, first_head):
        size = min(p.width, p.q.shape[0])
        for consumer in range(p.num_consumers):
            token, head, _ = p.share(consumer, count)
            for c in p.chunks:
                heads = pl.ds(first_head + head, config.heads)
                source = p.q.at[pl.ds(start + token, size), heads, pl.ds(c * COLUMNS, COLUMNS)]
                target = p.rows[0][1].at[place, consumer, c, pl.ds(0, size)]
                plgpu.copy_gmem_to_smem(source, target, p.q_full.at[place])

    def work(items, done, item):
        seq, context, head = item.seq, item.context, lax.div(item.head, p.q.shape[1] // p.kv_heads)
        last_block, num_tiles = lax.div(context - 1, block_size), p.kv_tiles(context)
        place = lax.rem(items, config.num_queries)
        pl.when(items >= config.num_queries)(lambda: plgpu.barrier_wait(p.q_free.at[place]))
        copy_queries(place, item.start, item.count, item.head)

        def step(index, _):
            slot = p.slot(done + index)
            blocks = page_blocks(p.tables, seq, index * tile, last_block, tile=tile, block_size=block_size)
            for part in (0, 1):
                pl.when(done + index >= stages)(lambda part=part: plgpu.barrier_wait(p.free[part].at[slot]))
                partial = (context < (index + 1) * tile) & (part == 1)
                full = p.full[part].at[jnp.where(partial, stages, slot)]
                base = (2 * layer + part) * p.num_blocks
                copy_pages(p.kv, base, blocks, p.kv_heads, head, index * tile, p.rings[part].at[slot], full)

        lax.fori_loop(0, num_tiles, step, None)

        @pl.when(context < num_tiles * tile)
        def _():
            slot = p.slot(done + num_tiles - 1)
            full, used = p.full[1], context - (num_tiles - 1) * tile
            pages = max(1, tile // block_size)
            zero_tail(p.rings[1].at[slot], used, full.at[stages], full.at[slot], pages)

    items, tiles = p.each_item(work)

    def drain(barriers, count, _):
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(count, barrier.shape[0])])

    lax.fori_loop(jnp.maximum(tiles - stages, 0), tiles, functools.partial(drain, p.free), None)
    first = jnp.maximum(items - config.num_queries, 0)
    lax.fori_loop(first, items, functools.partial(drain, (p.q_free,)), None)


def consume(program: Program, me) -> None:
    """Consumer `me`: its rows of every item."""
    p = program
    if registers := REGISTERS[p.num_consumers]:
        plgpu.set_max_registers(registers[1], action="increase")
    pl.when(me == 0)(lambda: zero_pads(p.out, p.starts, p.sm, p.config.num_sms))
    if p.config.take_turns:
        pl.when(me == p.num_consumers - 1)(lambda: plgpu.barrier_arrive(p.turns.at[0]))

    def work(items, done, item):
        first, head, used = p.share(me, item.count)
        num_tiles, place = p.kv_tiles(item.context), lax.rem(items, p.config.num_queries)
        plgpu.barrier_wait(p.q_full.at[place])
        rows = (item.start + first, item.position + first, used, item.head + head)
        pl.when(used > 0)(lambda: _attend(p, me, place, done, num_tiles, *rows))
        pl.when(used == 0)(lambda: _pass(p, me, place, done, num_tiles))

    p.each_item(work)
    plgpu.wait_smem_to_gmem(0)
    if p.config.take_turns:
        pl.when(me == 0)(lambda: plgpu.barrier_wait(p.turns.at[0]))


def _take_turn(p: Program, me) -> None:
    if p.config.take_turns:
        plgpu.barrier_wait(p.turns.at[me])


def _pass_turn(p: Program, me) -> None:
    if p.config.take_turns:
        plgpu.barrier_arrive(p.turns.at[lax.rem(me + 1, p.num_consumers)])


def _pass(p: Program, me, place, done, num_tiles) -> None:
    """An item without rows for this consumer: what the others wait for, and nothing else."""

    def step(index, _):
        slot = p.slot(done + index)
        plgpu.barrier_wait(p.full[0].at[slot])
        plgpu.barrier_arrive(p.free[0].at[slot])

        @pl.when(index > 0)
        def _():
            _take_turn(p, me)
            _pass_turn(p, me)

        plgpu.barrier_wait(p.full[1].at[slot])
        plgpu.barrier_arrive(p.free[1].at[slot])

    lax.fori_loop(0, num_tiles, step, None)
    plgpu.barrier_arrive(p.q_free.at[place])


def _attend(p: Program, me, place, done, num_tiles, token, position, used, first_head) -> None:
    """Attention of `used` tokens from `token` on, the first at `position`; its kv tiles come after `done` others."""
    tile, share, interpret = p.config.tile, p.config.share_output, p.interpret
    head_dim, (keys, values) = p.q.shape[2], p.rings
    (k_full, v_full), (k_free, v_free) = p.full, p.free
    q_tiles, q_tokens = (ref.at[place, me] for ref in p.rows[0])
    o_tiles, o_tokens = (ref.at[place, me] for ref in p.rows[0]) if share else (ref.at[0, me] for ref in p.rows[1])
    scores_type = plgpu.WGMMAAccumulatorRef((ROWS, tile), jnp.float32)
    num_visible = jnp.minimum(1 if p.config.mask_all else lax.div(position + 1, tile), num_tiles)  # need no mask

    def issue_scores(acc, slot):
        for c in p.chunks:
            columns = keys.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
            plgpu.wgmma(acc, q_tiles.at[c], columns.transpose((1, 0)))

    def issue_output(acc, weights, slot):
        if interpret:
            p.weights.at[me][...] = weights
            plgpu.commit_smem()
            weights = p.weights.at[me]
        plgpu.wgmma(acc, weights, values.at[slot])

    def first_scores(acc):
        issue_scores(acc, p.slot(done))
        return plgpu.wgmma_accumulator_load(acc)

    if interpret:  # elsewhere the two refs are one memory
        for c in p.chunks:
            q_tiles.at[c][...] = q_tokens[c].reshape(ROWS, COLUMNS)
        plgpu.commit_smem()
    plgpu.barrier_wait(k_full.at[p.slot(done)])
    scores = pl.run_scoped(first_scores, scores_type)
    plgpu.barrier_arrive(k_free.at[p.slot(done)])
    weights, top, total, _ = online_softmax(causal(scores, position, p.config.heads), p.factor, None)
    out = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

    def step(index, state, masked: bool):
        out, top, total, weights = state
        slot, before = p.slot(done + index), p.slot(done + index - 1)

        def products(scores_acc, out_acc):
            if not interpret:
                out_acc[...] = out
            issue_scores(scores_acc, slot)
            issue_output(out_acc, weights, before)
            _pass_turn(p, me)
            scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
            plgpu.barrier_arrive(k_free.at[slot])
            scores = causal(scores, position - index * tile, p.config.heads) if masked else scores
            new_weights, *new = lax.optimization_barrier(online_softmax(scores, p.factor, (top, total)))
            p.sums.at[me][...] = new[1]  # see above: nobody reads it
            new_out = plgpu.wgmma_accumulator_load(out_acc)
            plgpu.barrier_arrive(v_free.at[before])
            return new_out + out if interpret else new_out, as_operand(new_weights, p.q.dtype), *new

        plgpu.barrier_wait(k_full.at[slot])
        plgpu.barrier_wait(v_full.at[before])
        _take_turn(p, me)
        out, weights, top, total, fade = pl.run_scoped(
            products, scores_type, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32)
        )
        return out * lax.broadcast_in_dim(fade, out.shape, [0]), top, total, weights

    state = (out, top, total, as_operand(weights, p.q.dtype))
    state = lax.fori_loop(1, num_visible, functools.partial(step, masked=False), state)
    state = lax.fori_loop(jnp.maximum(num_visible, 1), num_tiles, functools.partial(step, masked=True), state)
    out, _, total, weights = state
    if not share:
        plgpu.barrier_arrive(p.q_free.at[place])

    def last_product(acc):
        if not interpret:
            acc[...] = out
        issue_output(acc, weights, last)
        new_out = plgpu.wgmma_accumulator_load(acc)
        return new_out + out if interpret else new_out

    last = p.slot(done + num_tiles - 1)
    plgpu.barrier_wait(v_full.at[last])
    out = pl.run_scoped(last_product, plgpu.WGMMAAccumulatorRef((ROWS, head_dim), jnp.float32))
    plgpu.barrier_arrive(v_free.at[last])
    out *= lax.broadcast_in_dim(1.0 / total, out.shape, [0])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
    for c in p.chunks:
        part = out[:, c * COLUMNS : (c + 1) * COLUMNS].astype(p.out.dtype)
        if interpret:
            o_tokens.at[c][...] = part.reshape(o_tokens.shape[1:])
        else:
            o_tiles.at[c][...] = part
    plgpu.commit_smem()
    store_tokens(o_tokens, p.out, token, used, first_head)
    if share:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(p.q_free.at[place])
