"""Backend "mosaic", decode on Hopper: paged attention of one query a sequence, all programs with the same work.

The kv tiles of a step's (sequence, kv head) pairs form one long list, which is cut into equal runs, two for each
multiprocessor ("stream-K", Osama et al. 2023, arXiv:2301.03598): whatever the mix of lengths, all end together.

    tiles    | seq 0 head 0 | seq 0 head 1 | seq 1 head 0            | seq 1 head 1            | ...
    runs     |---- run 0 ----|---- run 1 ----|---- run 2 ----|---- run 3 ----| ...

A run belongs to a pair of warpgroups: the producer streams keys and values, whole (block, head) tiles by bulk copies,
through rings of shared memory, on into the next pair without a pause; the consumer's wgmma takes the G query heads as
the first of its 64 rows. A pair that lies in one run is written directly; pieces of a pair that a cut divides are
combined by a small second launch. Memory traffic: keys and values once.
Supported: bfloat16, head_dim 64 and 128, block sizes of `MOSAIC_BLOCK_SIZES`, up to 64 query heads a kv head. Sums are
float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton

from .decode_mosaic_roles import RUNS, STAGES, TILE, Run, consume, produce
from .device import num_sms
from .mosaic_tiles import COLUMNS, ROWS, TRANSFORMS
from .precision import LOG2_E
from .shapes import MOSAIC_BLOCK_SIZES, MOSAIC_HEAD_DIMS
from .triton_tiles import next_power_of_two

HEAD_DIMS = MOSAIC_HEAD_DIMS["decode_attention"]
FIELDS = 6  # of a run, see `_runs`


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    arrivals: jax.Array,
    *,
    scale: float,
    programs: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """q [B, Hq, D], kv [L, 2, N, Hkv, P, D], tables [B, W], lens [B] -> ([B, Hq, D], arrivals); length 0 -> zeros.

    `interpret` runs it on a CPU with race detection: the weights go through shared memory there, as the interpreter's
    wgmma has no register operand. Raises ValueError for shapes and dtypes that it has no code for.
    """
    head_dim, block_size, group = kv.shape[5], kv.shape[4], q.shape[1] // kv.shape[3]
    if kv.dtype != jnp.bfloat16 or head_dim not in HEAD_DIMS or block_size not in MOSAIC_BLOCK_SIZES or group > ROWS:
        raise ValueError(
            f"kv is {kv.dtype.name} with head_dim {head_dim}, block size {block_size} and {group} query heads a kv "
            f"head; the mosaic kernel has bfloat16, {HEAD_DIMS}, {MOSAIC_BLOCK_SIZES} and up to {ROWS}"
        )
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    programs = programs or (2 if interpret else num_sms())
    out = _launch(layers, q, kv, block_tables, context_lens, scale=scale, programs=programs, interpret=interpret)
    return out, arrivals


@functools.partial(jax.jit, static_argnames=("scale", "programs", "interpret"))  # lowered once for all layers
def _launch(layers, q, kv, tables, lens, *, scale: float, programs: int, interpret: bool) -> jax.Array:
    num_heads, head_dim = q.shape[1:]
    num_blocks, kv_heads, block_size = kv.shape[2:5]
    group, slots = num_heads // kv_heads, 2 * RUNS * programs

    def kernel(*refs):
        me = lax.axis_index("warpgroup")
        run = lax.rem(me, RUNS)
        index = lax.axis_index("sm") * RUNS + run
        p = Run(scale * LOG2_E, num_blocks, kv_heads, group, interpret, run, index, *refs)
        pl.when(me >= RUNS)(lambda: produce(p))
        pl.when(me < RUNS)(lambda: consume(p))

    chunks = head_dim // COLUMNS
    copies = max(1, TILE // block_size)
    tiles = plgpu.SMEM((RUNS, 2, chunks, ROWS, COLUMNS), q.dtype, transforms=TRANSFORMS)
    padded = next_power_of_two(group)  # so that both views of the memory have the same strides
    heads = plgpu.SMEM((RUNS, 2, chunks, ROWS // padded, padded, COLUMNS), q.dtype, transforms=TRANSFORMS[1:])
    parts = plgpu.SMEM((RUNS, 2, ROWS, COLUMNS * chunks // 2), jnp.float32)
    rows = (tiles, heads, parts) if interpret else plgpu.RefUnion(tiles, heads, parts)
    rings = tuple(plgpu.SMEM((RUNS, n, TILE, head_dim), q.dtype, transforms=TRANSFORMS) for n in STAGES)
    scratch = [
        rows,
        rings,
        tuple(plgpu.Barrier(num_arrivals=copies, num_barriers=RUNS * (n + 1)) for n in STAGES),
        tuple(plgpu.Barrier(num_barriers=RUNS * n) for n in STAGES),
        plgpu.Barrier(num_arrivals=chunks, num_barriers=RUNS * 2),
        plgpu.Barrier(num_barriers=RUNS * 2),
        plgpu.SMEM((RUNS, ROWS), jnp.float32),
    ]
    if interpret:
        scratch.append(plgpu.SMEM((RUNS, ROWS, TILE), q.dtype, transforms=TRANSFORMS))
    launch = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((slots, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((slots, ROWS), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=2 * RUNS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=512,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="paged_decode_mosaic",
    )
    runs, walk = _runs(lens, kv_heads, RUNS * programs)
    out, part, weight = launch(layers, q, kv.reshape(-1, block_size, head_dim), tables, runs, walk)
    return pl.pallas_call(
        functools.partial(_combine_kernel, group=group),
        grid=(RUNS * programs, group),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={4: 0},
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(runs, walk, part, weight, out)


def _runs(context_lens, kv_heads: int, count: int) -> tuple[jax.Array, jax.Array]:
    """The cuts: runs [count, FIELDS] and walk [B, 2], int32; the same for every layer, so XLA computes them once.

    A run: sequence, kv head and tile where it starts, its tiles, the tiles of the run before, and the first run that
    starts behind this one's first pair. walk: a sequence's context, and the next sequence that has one (or B).
    """
    batch = context_lens.shape[0]
    tiles = pl.cdiv(context_lens, TILE)
    order = jnp.arange(batch)
    ends = kv_heads * jnp.sum(jnp.where(order <= order[:, None], tiles, 0), axis=1)
    total = ends[-1]
    index = jnp.arange(count + 1, dtype=jnp.int32)
    starts = index * (total // count) + index * (total % count) // count
    first, sizes = starts[:-1], jnp.diff(starts)
    seq = jnp.minimum(jnp.sum(ends <= first[:, None], axis=1), batch - 1)
    own = jnp.maximum(tiles[seq], 1)
    offset = first - (ends[seq] - kv_heads * tiles[seq])
    head, tile = offset // own, offset % own
    until = jnp.sum(first < (first - tile + own)[:, None], axis=1)
    before = jnp.concatenate([jnp.zeros(1, sizes.dtype), sizes[:-1]])
    later = (order > order[:, None]) & (tiles > 0)
    following = jnp.min(jnp.where(later, order, batch), axis=1)
    runs = jnp.stack([seq, head, tile, sizes, before, until], axis=1)
    return runs.astype(jnp.int32), jnp.stack([context_lens, following], axis=1).astype(jnp.int32)


def _combine_kernel(runs_ref, walk_ref, part_ref, weight_ref, _, out_ref, *, group: int):
    """The pieces of the pair in which run `index` starts, if that is the first cut in it; zeros for empty contexts.

    One query head of a group a program.
    """
    index, row = pl.program_id(0), pl.program_id(1)
    seq, head, tile, _, before, until = (runs_ref[index, i] for i in range(FIELDS))
    batch, count = walk_ref.shape[0], runs_ref.shape[0]
    for first in range(0, batch, count):
        own = jnp.minimum(first + index, batch - 1)

        @pl.when((first + index < batch) & (walk_ref[own, 0] == 0))
        def _(own=own):
            for kv_head in range(out_ref.shape[1] // group):
                out_ref[own, kv_head * group + row, :] = jnp.zeros((out_ref.shape[2],), out_ref.dtype)

    @pl.when((tile > 0) & (tile <= before))
    def _():
        at_once = 16

        def step(number, state):
            top, total, acc = state
            run = index - 1 + number * at_once + lax.iota(jnp.int32, at_once)
            used = run < until
            used &= triton.load(runs_ref.at[run, jnp.full_like(run, 3)], mask=used, other=0) > 0
            slot = 2 * run + jnp.where(run < index, 1, 0)
            log = triton.load(weight_ref.at[slot, jnp.full_like(slot, 0) + row], mask=used, other=-jnp.inf)
            shape = (at_once, part_ref.shape[2])
            where = (
                jnp.broadcast_to(slot[:, None], shape),
                jnp.broadcast_to(row, shape),
                lax.broadcasted_iota(jnp.int32, shape, 1),
            )
            parts = triton.load(part_ref.at[where], mask=used[:, None], other=0.0)
            new_top = jnp.maximum(top, jnp.max(log))
            weights, fade = jnp.exp2(log - new_top), jnp.exp2(top - new_top)
            return new_top, total * fade + jnp.sum(weights), acc * fade + jnp.sum(parts * weights[:, None], axis=0)

        state = jnp.float32(-1e30), jnp.float32(0), jnp.zeros((part_ref.shape[2],), jnp.float32)
        _, total, acc = lax.fori_loop(0, pl.cdiv(until - index + 1, at_once), step, state)
        out_ref[seq, head * group + row, :] = (acc / total).astype(out_ref.dtype)
