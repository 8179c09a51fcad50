"""Backend "mosaic", ragged steps on Hopper: FlashAttention 3 over the paged cache, through Pallas Mosaic GPU.

One persistent launch a layer. A work item is one tile of the plan for `heads` query heads of one kv head. One
warpgroup, the producer, streams keys and values of its context into rings of shared memory, whole (block, head)
tiles by bulk copies. Up to three others, the consumers, take 64 rows each and share the rings. Row r of an item is
query token r // heads, head r % heads. A tile of one token leaves all but one of them without rows, so there they
take further heads of the kv head, whose keys and values are read once:

    producer     K0 V0 K1 V1 K2 ...                            next item's Q, K0, V0 ...
    consumer     QK0 softmax0 | QK1 PV0 softmax1 | QK2 PV1 softmax2 | ... PVn | store
                                '---- both products are in flight; PV0's ends after softmax1

Which items a program works on is in prefill_mosaic_work, the roles in prefill_mosaic_roles. Method: FlashAttention 3
(Shah et al. 2024, arXiv:2407.08608). Memory traffic: q and the output once, keys and values once an item (mostly from
L2). Supported: bfloat16, head_dim and block size as in `shapes`, any head ratio, query_tile up to 192. Accumulates in
float32.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .device import num_sms
from .mosaic_tiles import COLUMNS, ROWS, TRANSFORMS, zeroes_pads
from .precision import LOG2_E
from .prefill_mosaic_program import Program
from .prefill_mosaic_roles import REGISTERS, consume, produce
from .prefill_mosaic_work import MAX_ITEMS, deal, packed, work_table
from .shapes import MOSAIC_BLOCK_SIZES, MOSAIC_HEAD_DIMS

HEAD_DIMS = MOSAIC_HEAD_DIMS["ragged_attention"]
_THREAD = "warpgroup"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tunables.

    heads         query heads of an item: a power of two that divides G; heads * query_tile rows, 64 a consumer
    tile          context tokens a kv tile, a multiple of 64
    num_stages    kv tiles in the rings
    num_queries   items whose queries are in shared memory: the next one's come while one is worked on
    num_sms       programs of the launch, dealt the items; as many as items: one each
    take_turns    one consumer's products are issued while another's softmax runs
    share_output  the output leaves through the queries' memory: less memory, held longer
    mask_all      every kv tile goes through the masked code: see prefill_triton
    lanes         consumers that share an item of one token, each with `heads` other heads; heads * lanes divides G
    """

    heads: int
    tile: int
    num_stages: int
    num_sms: int
    num_queries: int = 2
    take_turns: bool = True
    share_output: bool = False
    mask_all: bool = False
    lanes: int = 1


def prefill_config(group: int, head_dim: int, query_tile: int, sms: int) -> PrefillConfig:
    """The untuned default: as many heads of a group as give two consumers work."""
    heads = 1
    while group % (2 * heads) == 0 and query_tile * 2 * heads <= 2 * ROWS:
        heads *= 2
    num_consumers = pl.cdiv(query_tile * heads, ROWS)
    lanes = max(n for n in range(1, num_consumers + 1) if group % (n * heads) == 0)
    if head_dim <= 128:
        return PrefillConfig(heads, tile=128, num_stages=2, num_sms=sms, lanes=lanes)
    return PrefillConfig(heads, tile=64, num_stages=2, num_sms=sms, num_queries=1, share_output=True, lanes=lanes)


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
    """q [T, Hq, D] packed by sequence, tables [B, W], tiles [NT] (tile_seq -1: no work) -> [T, Hq, D], pads zero.

    scale > 0. `interpret` runs it on a CPU with race detection: the weights go through shared memory, as the
    interpreter's wgmma has no register operand. Raises ValueError for shapes and dtypes that it has no code for.
    """
    head_dim, block_size = kv.shape[5], kv.shape[4]
    if kv.dtype != jnp.bfloat16 or head_dim not in HEAD_DIMS or block_size not in MOSAIC_BLOCK_SIZES:
        raise ValueError(
            f"kv is {kv.dtype.name} with head_dim {head_dim} and block size {block_size}; the mosaic kernel has "
            f"bfloat16, {HEAD_DIMS} and {MOSAIC_BLOCK_SIZES}"
        )
    group = q.shape[1] // kv.shape[3]
    config = config or prefill_config(group, head_dim, query_tile, num_programs(interpret))
    if pl.cdiv(query_tile * config.heads, ROWS) not in REGISTERS:
        limit = ROWS * max(REGISTERS) // config.heads
        raise ValueError(f"query_tile is {query_tile}; with {config.heads} heads an item the limit is {limit}")
    for what, count in (("rows", block_tables.shape[0]), ("items", tile_seq.shape[0] * (q.shape[1] // config.heads))):
        if count > MAX_ITEMS:
            raise ValueError(f"{count} {what} a step: the mosaic kernel has {MAX_ITEMS} at most; make steps smaller")
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    plan = block_tables, context_lens, query_start, tile_seq, tile_start
    out = _launch(layers, q, kv, *plan, scale=scale, query_tile=query_tile, config=config, interpret=interpret)
    if zeroes_pads(*q.shape[1:]):
        return out
    token = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    return jnp.where(token < query_start[-1], out, jnp.zeros((), out.dtype))


def num_programs(interpret: bool) -> int:
    """Of a launch."""
    return 2 if interpret else num_sms()


def invariant_attention(
    q: jax.Array, kv: jax.Array, *plan, query_tile: int, interpret: bool = False, **options
) -> jax.Array:
    """`ragged_attention`, in which a query's result doesn't depend on its tile: where it lies, what else is in it."""
    config = prefill_config(q.shape[1] // kv.shape[3], kv.shape[5], query_tile, num_programs(interpret))
    config = replace(config, mask_all=True)
    return ragged_attention(q, kv, *plan, query_tile=query_tile, config=config, interpret=interpret, **options)


@functools.partial(jax.jit, static_argnames=("scale", "query_tile", "config", "interpret"))  # lowered for all layers
def _launch(
    layers, q, kv, tables, lens, starts, tile_seq, tile_start, *, scale, query_tile, config: PrefillConfig, interpret
) -> jax.Array:
    head_dim, (num_blocks, kv_heads, block_size) = q.shape[2], kv.shape[2:5]
    num_consumers = pl.cdiv(query_tile * config.heads, ROWS)

    def kernel(*refs):
        sm = jax.lax.axis_index("sm")
        program = Program(config, scale * LOG2_E, num_consumers, num_blocks, kv_heads, interpret, sm, *refs)
        me = jax.lax.axis_index(_THREAD)
        pl.when(me == num_consumers)(lambda: produce(program))
        pl.when(me < num_consumers)(lambda: consume(program, me))

    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(config.num_sms,),
        grid_names=("sm",),
        num_threads=num_consumers + 1,
        thread_name=_THREAD,
        scratch_types=_scratch(config, num_consumers, head_dim, block_size, q.dtype, interpret),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the roles say where barriers are
            reduction_scratch_bytes=512,  # a row lies in one warp: its maximum and sum need none
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="paged_ragged_mosaic",
    )
    work = work_table(lens, starts, tile_seq, tile_start, query_tile)
    groups = q.shape[1] // config.heads
    dealt = deal(
        work, long_items=groups, short_items=groups // config.lanes, kv_tile=config.tile, programs=config.num_sms
    )
    return launch(layers, q, kv.reshape(-1, block_size, head_dim), tables, starts, *packed(work, dealt))


def _scratch(config: PrefillConfig, num_consumers: int, head_dim: int, block_size: int, dtype, interpret: bool) -> list:
    """Shared memory and barriers, in the order of Program's last fields.

    Queries start at any token, which a tiled copy can't. So they come as rows of 64 columns under a swizzle of 128
    bytes: the very layout that wgmma reads as (8, 64) tiles. A union names one memory both ways; the output leaves
    likewise. In the interpreter these are two memories.
    """
    chunks, stages = head_dim // COLUMNS, config.num_stages

    def rows(items: int):
        blocks = items, num_consumers, chunks
        tiles = plgpu.SMEM((*blocks, ROWS, COLUMNS), dtype, transforms=TRANSFORMS)
        tokens = plgpu.SMEM((*blocks, ROWS // config.heads, config.heads, COLUMNS), dtype, transforms=TRANSFORMS[1:])
        return (tiles, tokens) if interpret else plgpu.RefUnion(tiles, tokens)

    ring = plgpu.SMEM((stages, config.tile, head_dim), dtype, transforms=TRANSFORMS)
    copies = max(1, config.tile // block_size)
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages + 1)  # the last one is the producer's own
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=stages)
    scratch = [
        (rows(config.num_queries),) if config.share_output else (rows(config.num_queries), rows(1)),
        (ring, ring),
        (full, full),
        (free, free),
        plgpu.Barrier(num_arrivals=num_consumers * chunks, num_barriers=config.num_queries),
        plgpu.Barrier(num_arrivals=num_consumers, num_barriers=config.num_queries),
        plgpu.Barrier(num_barriers=num_consumers),
        plgpu.SMEM((num_consumers, ROWS), jnp.float32),
    ]
    if interpret:
        scratch.append(plgpu.SMEM((num_consumers, ROWS, config.tile), dtype, transforms=TRANSFORMS))
    return scratch
