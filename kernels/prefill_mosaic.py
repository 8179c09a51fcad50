"""Backend "mosaic", ragged steps on Hopper: FlashAttention 3 over the paged cache, through Pallas Mosaic GPU.

One persistent launch a layer. A work item is one tile of the plan for `heads` query heads of one kv head. One
warpgroup (the producer) streams keys and values of its context into rings of shared memory, whole (block, head)
tiles by bulk copies; up to three others (the consumers) take 64 rows each and share the ring. Row r of an item is
query token r // heads, head r % heads, so the second consumer of a single-token row has nothing to compute:

    producer     K0 V0 K1 V1 K2 ...                            next item's Q, K0, V0 ...
    consumer     QK0 softmax0 | QK1 PV0 softmax1 | QK2 PV1 softmax2 | ... PVn | store
                                '---- both products run while the softmax of the tile before ends

Only kv tiles that reach beyond the tile's first query are masked. Rows of values behind the context may hold NaN
and 0 * NaN is NaN: the producer zeroes them in shared memory. Items are dealt heaviest first, back and forth over
the machine, from a table (`_work_table`) that XLA computes once a step, as it is the same for every layer.

Queries start at any token, so they are copied untiled, 64 columns at a time: with a swizzle of 128 bytes that is
the very layout which wgmma reads as tiles of (8, 64), and two refs of one union name it. The output leaves the
same way; tiles of fewer than 64 tokens go out in copies of 32, 16, ... 1 rows, so no row of another sequence is
written. Method: FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608).
Memory traffic: q and the output once, keys and values once an item (mostly from L2). Supported: bfloat16, head_dim
64, 128, 256, block sizes that divide the kv tile or are a multiple of it, any head ratio and query_tile up to 192.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .device import num_sms

LOG2_E = 1.4426950408889634
ROWS = 64  # rows of a consumer: what one wgmma takes
COLUMNS = 64  # columns of a copy: 128 bytes, the swizzle
_REGISTERS = {1: None, 2: (24, 240), 3: (32, 160)}  # by consumers: a thread of the producer, of a consumer
_TRANSFORMS = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))
_THREAD = "warpgroup"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tunables: query heads an item (a power of two that divides G), context tokens a kv tile, kv tiles in flight.

    take_turns: one consumer's products run during another's softmax. share_output: the output leaves through the
    queries' memory. num_sms: programs of the launch.
    """

    heads: int
    tile: int
    num_stages: int
    take_turns: bool = True
    share_output: bool = False
    num_sms: int = 132


def prefill_config(group: int, head_dim: int, query_tile: int, num_sms: int = 132) -> PrefillConfig:
    """The untuned default: as many heads of a group as give two consumers work."""
    heads = 1
    while group % (2 * heads) == 0 and query_tile * 2 * heads <= 2 * ROWS:
        heads *= 2
    tile = 128 if head_dim <= 128 else 64
    return PrefillConfig(heads, tile, num_stages=2, share_output=head_dim > 128, num_sms=num_sms)


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
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q [T, Hq, D] packed by sequence, tables [B, W], tiles [NT] (tile_seq -1: no work) -> [T, Hq, D], pads zero."""
    group, head_dim = q.shape[1] // kv.shape[3], q.shape[2]
    config = config or prefill_config(group, head_dim, query_tile, num_sms())
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    plan = block_tables, context_lens, query_start, tile_seq, tile_start
    return _attend(layers, q, kv, *plan, scale=scale, query_tile=query_tile, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("scale", "query_tile", "config", "interpret"))  # lowered once, not by layer
def _attend(
    layers, q, kv, tables, lens, starts, tile_seq, tile_start, *, scale, query_tile, config: PrefillConfig, interpret
) -> jax.Array:
    head_dim, block_size = q.shape[2], kv.shape[4]
    num_consumers = pl.cdiv(query_tile * config.heads, ROWS)
    assert num_consumers in _REGISTERS
    assert config.tile % block_size == 0 or block_size % config.tile == 0
    pages = max(1, config.tile // block_size)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            scale=scale,
            config=config,
            num_consumers=num_consumers,
            kv_shape=kv.shape[2:4],
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(config.num_sms,),
        grid_names=("sm",),
        num_threads=num_consumers + 1,
        thread_name=_THREAD,
        scratch_types=_scratch(config, num_consumers, head_dim, pages, q.dtype, interpret),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=512,  # a row lies in one warp: its maximum and sum need none
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="paged_ragged_mosaic",
    )
    work = _work_table(lens, starts, tile_seq, tile_start, query_tile)
    return kernel(layers, q, kv.reshape(-1, block_size, head_dim), tables, starts, work)


def _work_table(context_lens, query_start, tile_seq, tile_start, query_tile: int) -> jax.Array:
    """int32 [NT, 5], heaviest first: sequence (-1: no work), first token, tokens, its position, context of the last."""
    used = tile_seq >= 0
    seq = jnp.where(used, tile_seq, 0)
    seq_end = query_start[seq + 1]
    count = jnp.minimum(query_tile, seq_end - tile_start)
    position = context_lens[seq] - seq_end + tile_start
    context = jnp.where(used, position + count, -1)
    table = jnp.stack([tile_seq, tile_start, count, position, context], axis=1)
    index = jnp.arange(len(tile_seq), dtype=jnp.int32)
    ahead = (context > context[:, None]) | ((context == context[:, None]) & (index < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)  # a sort of some hundred numbers: no sort kernel in the step
    return jnp.sum(jnp.where((rank == index[:, None])[:, :, None], table, 0), axis=1, dtype=jnp.int32)


def _scratch(config: PrefillConfig, num_consumers: int, head_dim: int, pages: int, dtype, interpret: bool) -> list:
    """Shared memory and barriers, in the order of _kernel's last arguments."""
    blocks = num_consumers, head_dim // COLUMNS
    tiles = plgpu.SMEM((*blocks, ROWS, COLUMNS), dtype, transforms=_TRANSFORMS)
    tokens = plgpu.SMEM((*blocks, ROWS // config.heads, config.heads, COLUMNS), dtype, transforms=_TRANSFORMS[1:])
    union = (tiles, tokens) if interpret else plgpu.RefUnion(tiles, tokens)
    ring = plgpu.SMEM((config.num_stages, config.tile, head_dim), dtype, transforms=_TRANSFORMS)
    full = plgpu.Barrier(num_arrivals=pages, num_barriers=config.num_stages + 1)  # the last one: the producer's own
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=config.num_stages)
    scratch = [
        (union,) if config.share_output else (union, union),  # queries, output
        (ring, ring),  # keys, values
        (full, full),
        (free, free),
        plgpu.Barrier(num_arrivals=num_consumers * (head_dim // COLUMNS)),  # queries are there
        plgpu.Barrier(num_arrivals=num_consumers),  # queries have been read
        plgpu.SMEM((num_consumers, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=num_consumers),  # turns at the tensor cores
    ]
    if interpret:
        scratch.append(plgpu.SMEM((num_consumers, ROWS, config.tile), dtype, transforms=_TRANSFORMS))
    return scratch


def _kernel(
    layer_ref,
    q_ref,
    kv_ref,
    tables_ref,
    starts_ref,
    work_ref,
    out_ref,
    rows_smem,
    ring_smem,
    full,
    free,
    q_full,
    q_free,
    sums_smem,
    turns,
    p_smem=None,
    *,
    scale: float,
    config: PrefillConfig,
    num_consumers: int,
    kv_shape: tuple[int, int],
    interpret: bool,
):
    tokens, num_heads, head_dim = q_ref.shape
    num_blocks, kv_heads = kv_shape
    block_size = kv_ref.shape[1]
    group, heads, width = num_heads // kv_heads, config.heads, ROWS // config.heads
    tile, stages = config.tile, config.num_stages
    page = min(tile, block_size)
    chunks, registers = range(head_dim // COLUMNS), _REGISTERS[num_consumers]
    (q_tiles, q_tokens), (o_tiles, o_tokens) = rows_smem[0], rows_smem[-1]
    (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = ring_smem, full, free
    me, sm = lax.axis_index(_THREAD), lax.axis_index("sm")
    head_groups = num_heads // heads
    num_items = work_ref.shape[0] * head_groups
    num_rounds = pl.cdiv(num_items, config.num_sms)
    items_of = functools.partial(_item, work_ref, sm, config.num_sms, head_groups, heads)

    def each_item(work):
        """Calls work(number of kv tiles so far, item) for this program's items; returns the number of kv tiles."""

        def body(index, carry):
            done, *item = carry
            following = items_of(index + 1)  # read early: global memory is slow
            used = item[4] > 0
            pl.when(used)(lambda: work(done, item))
            return (done + jnp.where(used, lax.div(item[4] + (tile - 1), tile), 0), *following)

        return lax.fori_loop(0, num_rounds, body, (jnp.int32(0), *items_of(jnp.int32(0))))[0]

    @pl.when(me == num_consumers)
    def _producer():
        if registers:
            plgpu.set_max_registers(registers[0], action="decrease")
        layer = layer_ref[0]

        def load(part, smem, full, slot, seq, head, first, last_block):

            base = (2 * layer + part) * num_blocks
            for i in range(tile // page):
                index = lax.div(first, block_size) + i
                block = tables_ref[seq, jnp.minimum(index, last_block)]
                rows = pl.ds(lax.rem(first, block_size) if block_size > page else 0, page)
                source = kv_ref.at[(base + block) * kv_heads + head, rows]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(i * page, page)], full)

        def produce(done, item):
            seq, start, _, _, context, first_head = item
            head = lax.div(first_head, group)

            @pl.when(done > 0)
            def _():
                plgpu.barrier_wait(q_free)

            size = min(width, tokens)
            for consumer in range(num_consumers):
                first = pl.ds(start + consumer * width, size)
                for c in chunks:
                    source = q_ref.at[first, pl.ds(first_head, heads), pl.ds(c * COLUMNS, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, q_tokens.at[consumer, c, pl.ds(0, size)], q_full)

            last_block = lax.div(context - 1, block_size)
            num_tiles = lax.div(context + (tile - 1), tile)

            def step(index, _):
                slot = lax.rem(done + index, stages)
                reused = done + index >= stages
                where = (slot, seq, head, index * tile, last_block)
                pl.when(reused)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                load(0, k_smem, k_full.at[slot], *where)
                pl.when(reused)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                partial = context < (index + 1) * tile
                load(1, v_smem, v_full.at[jnp.where(partial, stages, slot)], *where)

            lax.fori_loop(0, num_tiles, step, None)

            @pl.when(context < num_tiles * tile)
            def _():
                slot = lax.rem(done + num_tiles - 1, stages)
                plgpu.barrier_wait(v_full.at[stages])
                _zero_rows(v_smem.at[slot], context - (num_tiles - 1) * tile)
                plgpu.commit_smem()
                for _ in range(tile // page):
                    plgpu.barrier_arrive(v_full.at[slot])

        num_tiles = each_item(produce)

        def drain(index, _):
            plgpu.barrier_wait(k_free.at[lax.rem(index, stages)])
            plgpu.barrier_wait(v_free.at[lax.rem(index, stages)])

        lax.fori_loop(jnp.maximum(num_tiles - stages, 0), num_tiles, drain, None)

        @pl.when(num_tiles > 0)
        def _():
            plgpu.barrier_wait(q_free)

    @pl.when(me < num_consumers)
    def _consumer():
        if registers:
            plgpu.set_max_registers(registers[1], action="increase")
        factor = scale * LOG2_E

        @pl.when(me == 0)
        def _():
            _zero_pads(out_ref, starts_ref, sm, config.num_sms)

        if config.take_turns:

            @pl.when(me == num_consumers - 1)
            def _():
                plgpu.barrier_arrive(turns.at[0])

        def take_turn():
            if config.take_turns:
                plgpu.barrier_wait(turns.at[me])

        def pass_turn():
            if config.take_turns:
                plgpu.barrier_arrive(turns.at[lax.rem(me + 1, num_consumers)])

        def issue_scores(acc, slot):
            for c in chunks:
                keys = k_smem.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
                plgpu.wgmma(acc, q_tiles.at[me, c], keys.transpose((1, 0)))

        def softmax(scores, state, first, position, masked: bool):
            """(weights, maximum, sum, factor of what was summed before)."""
            if masked:
                column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
                token = row if heads == 1 else lax.shift_right_logical(row, heads.bit_length() - 1)
                scores = jnp.where(column - token <= position - first, scores, -jnp.inf)
            top = jnp.max(scores, axis=1) * factor
            if state is not None:
                top = jnp.maximum(top, state[0])
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, scores.shape, [0]))
            total = jnp.sum(weights, axis=1)
            if state is None:
                return weights, top, total, None
            fade = jnp.exp2(state[0] - top)
            return weights, top, state[1] * fade + total, fade

        def as_operand(weights):
            """In the cache's dtype. The barriers keep the conversion between the products: moved into one, it would
            write registers which a wgmma in flight reads, and ptxas would then run one wgmma at a time."""
            weights = lax.optimization_barrier(weights).astype(q_ref.dtype)
            return lax.optimization_barrier(weights)

        def consume(done, item):
            _, start, count, position, context, first_head = item
            used = jnp.clip(count - me * width, 0, width)
            num_tiles = lax.div(context + (tile - 1), tile)
            plgpu.barrier_wait(q_full)
            pl.when(used > 0)(lambda: attend(done, num_tiles, start, position, first_head, used))
            pl.when(used == 0)(lambda: pass_by(done, num_tiles))

        def pass_by(done, num_tiles):
            """What the others and the producer wait for, and nothing else."""

            def step(index, _):
                slot = lax.rem(done + index, stages)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])

                @pl.when(index > 0)
                def _():
                    take_turn()
                    pass_turn()

                plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])

            lax.fori_loop(0, num_tiles, step, None)
            plgpu.barrier_arrive(q_free)

        def attend(done, num_tiles, start, position, first_head, used):
            token, first_position = start + me * width, position + me * width
            num_visible = jnp.minimum(lax.div(first_position + 1, tile), num_tiles)  # whole tiles that all rows see
            slot_of = lambda index: lax.rem(done + index, stages)  # noqa: E731

            def first_scores(acc):
                issue_scores(acc, slot_of(0))
                return plgpu.wgmma_accumulator_load(acc)

            if interpret:  # elsewhere the two refs are one memory
                for c in chunks:
                    q_tiles.at[me, c][...] = q_tokens[me, c].reshape(ROWS, COLUMNS)
                plgpu.commit_smem()
            plgpu.barrier_wait(k_full.at[slot_of(0)])
            scores = pl.run_scoped(first_scores, plgpu.ACC((ROWS, tile), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot_of(0)])
            weights, top, total, _ = softmax(scores, None, 0, first_position, masked=True)
            p = as_operand(weights)
            acc = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

            def step(index, state, masked: bool):
                acc, top, total, p = state
                slot, before = slot_of(index), slot_of(index - 1)

                def products(scores_acc, out_acc):
                    if not interpret:
                        out_acc[...] = acc
                    issue_scores(scores_acc, slot)
                    weigh(out_acc, p, before)
                    pass_turn()
                    scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                    plgpu.barrier_arrive(k_free.at[slot])
                    new = softmax(scores, (top, total), index * tile, first_position, masked)
                    weights, *new = lax.optimization_barrier(new)
                    sums_smem.at[me][...] = new[1]  # holds the softmax back from ptxas, which would put it after the wait
                    out = plgpu.wgmma_accumulator_load(out_acc)
                    plgpu.barrier_arrive(v_free.at[before])
                    return out + acc if interpret else out, as_operand(weights), *new

                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[before])
                take_turn()
                accs = (plgpu.ACC((ROWS, tile), jnp.float32), plgpu.ACC((ROWS, head_dim), jnp.float32))
                acc, p, top, total, fade = pl.run_scoped(products, *accs)
                return acc * lax.broadcast_in_dim(fade, acc.shape, [0]), top, total, p

            def weigh(acc, p, slot):
                if interpret:  # its wgmma has no register operand
                    p_smem.at[me][...] = p
                    plgpu.commit_smem()
                    p = p_smem.at[me]
                plgpu.wgmma(acc, p, v_smem.at[slot])

            state = (acc, top, total, p)
            state = lax.fori_loop(1, num_visible, functools.partial(step, masked=False), state)
            state = lax.fori_loop(
                jnp.maximum(num_visible, 1), num_tiles, functools.partial(step, masked=True), state
            )
            acc, top, total, p = state
            if not config.share_output:
                plgpu.barrier_arrive(q_free)
            slot = slot_of(num_tiles - 1)
            plgpu.barrier_wait(v_full.at[slot])

            def last_product(out_acc):
                if not interpret:
                    out_acc[...] = acc
                weigh(out_acc, p, slot)
                out = plgpu.wgmma_accumulator_load(out_acc)
                return out + acc if interpret else out

            acc = pl.run_scoped(last_product, plgpu.ACC((ROWS, head_dim), jnp.float32))
            plgpu.barrier_arrive(v_free.at[slot])
            acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left
            for c in chunks:
                part = acc[:, c * COLUMNS : (c + 1) * COLUMNS].astype(out_ref.dtype)
                if interpret:
                    o_tokens.at[me, c][...] = part.reshape(width, heads, COLUMNS)
                else:
                    o_tiles.at[me, c][...] = part
            plgpu.commit_smem()
            _store_tokens(o_tokens.at[me], out_ref, token, used, first_head)
            if config.share_output:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free)

        each_item(consume)
        plgpu.wait_smem_to_gmem(0)
        if config.take_turns:

            @pl.when(me == 0)
            def _():
                plgpu.barrier_wait(turns.at[0])


def _item(work_ref, sm, num_sms: int, head_groups: int, head_width: int, index) -> tuple[jax.Array, ...]:
    """Row of the work table and first head of this program's item number `index`; context -1 where there is none."""
    #  round 0   program 0 1 2 ... n-1        the heaviest to program 0
    #  round 1   program n-1 ... 2 1 0        and it gets the lightest of the next round
    place = jnp.where(lax.rem(index, 2) == 0, sm, num_sms - 1 - sm)
    item = index * num_sms + place
    num_items = work_ref.shape[0] * head_groups
    row = lax.div(jnp.minimum(item, num_items - 1), head_groups)
    heads = lax.rem(item, head_groups)
    fields = [work_ref[row, i] for i in range(work_ref.shape[1])]
    fields[4] = jnp.where(item < num_items, fields[4], -1)
    return *fields, heads * head_width


def _zero_rows(tile_ref, used) -> None:
    """Zeros in the rows of a kv tile [tile, D] from row `used` on."""
    rows, head_dim = tile_ref.shape
    for first in range(0, rows, ROWS):

        @pl.when(used < first + ROWS)
        def _(first=first):
            for c in range(0, head_dim, COLUMNS):
                ref = tile_ref.at[pl.ds(first, ROWS), pl.ds(c, COLUMNS)]
                row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
                values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
                ref[...] = jnp.where(row < used - first, values, jnp.zeros((), values.dtype))


def _store_tokens(tokens_ref, out_ref, token, count, first_head) -> None:
    """`count` tokens of tokens_ref [D / 64, 64 / heads, heads, 64] to token, token + 1 ...: copies of 64, 32, ... 1."""
    chunks, size, heads, columns = tokens_ref.shape
    while size:
        if size <= out_ref.shape[0]:
            done = count - lax.rem(count, 2 * size)

            @pl.when(lax.rem(lax.div(count, size), 2) == 1)
            def _(size=size, done=done):
                for c in range(chunks):
                    target = out_ref.at[pl.ds(token + done, size), pl.ds(first_head, heads), pl.ds(c * columns, columns)]
                    plgpu.copy_smem_to_gmem(tokens_ref.at[c, pl.ds(done, size)], target)

        size //= 2


def _zero_pads(out_ref, starts_ref, sm, num_sms: int) -> None:
    """Zeros in this program's share of the tokens behind the last query."""
    tokens, num_heads, head_dim = out_ref.shape
    first = starts_ref[starts_ref.shape[0] - 1] + sm

    def body(index, _):
        out_ref.at[first + index * num_sms][...] = jnp.zeros((num_heads, head_dim), out_ref.dtype)

    lax.fori_loop(0, lax.div(jnp.maximum(tokens - first, 0) + (num_sms - 1), num_sms), body, None)
