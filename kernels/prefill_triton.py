"""Backend "triton", ragged steps: causal flash attention of packed prompt chunks over the paged cache.

One launch a layer, for any mix of prompt chunks and single-token rows. Work of one program: one tile of the plan
(up to query_tile consecutive query tokens of one sequence) and a few query heads of one kv head, query_tile * heads
rows. It walks the sequence's context from the start to the tile's last query, straight from the blocks: cached
prefix and new tokens alike, no gather of the prefix, no [T, T] matrix.

    context of the sequence    |---- cached prefix ----|---- this step's queries ----|
    tile                                                     |-- queries --|
    kv tiles without a mask    |------|------|------|------|-|
    kv tiles with causal mask                              |-|-----|-----|

Row r of a program is query token r // heads, head r % heads, so a tile of two heads shares its keys and
values. The programs also zero the step's pad tokens. Method: FlashAttention 2 (Dao 2023, arXiv:2307.08691).
Memory traffic: q and the output once, keys and values once a tile and program (Hq / heads programs a tile; mostly
from L2). Supported: head_dim a power of two 16..256, query_tile a power of two >= 16, any block size and head
ratio, float32 and bfloat16. Accumulates in float32.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .precision import LOG2_E
from .triton_tiles import MIN_DOT, as_rows, dot, load_kv_tile, next_power_of_two, online_softmax_step


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tunables: query heads a program (a power of two that divides G), context tokens a tile, warps, stages.

    mask_all: every kv tile goes through the masked code. Else a query's place in its tile decides which of the two it
    meets where, and they may round differently: a product and a difference become one operation in the other.
    """

    heads: int
    tile: int
    num_warps: int
    num_stages: int
    mask_all: bool = False


def prefill_config(group: int, head_dim: int, itemsize: int, query_tile: int) -> PrefillConfig:
    """The untuned default: 128 rows where two heads of a group can share a program, tiles of 64 tokens."""
    if itemsize == 4:  # products without tensor cores: small tiles, or registers spill
        return PrefillConfig(heads=1, tile=32 if head_dim <= 128 else 16, num_warps=8, num_stages=2)
    heads = 2 if group % 2 == 0 and query_tile * 2 <= 128 and head_dim <= 128 else 1
    rows = query_tile * heads
    tile = 64 if head_dim <= 128 else 32
    num_warps = 8 if rows * head_dim >= 128 * 128 else 4
    return PrefillConfig(heads, tile, num_warps, num_stages=3 if head_dim <= 128 else 2)


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

    Raises ValueError for a query_tile that isn't a power of two of at least 16.
    """
    if query_tile < MIN_DOT or query_tile & (query_tile - 1):
        raise ValueError(f"query_tile is {query_tile}; the triton kernel wants a power of two of at least {MIN_DOT}")
    tokens, num_heads, head_dim = q.shape
    group = num_heads // kv.shape[3]
    if config is None:
        config = prefill_config(group, head_dim, kv.dtype.itemsize, query_tile)
    num_tiles = tile_seq.shape[0]
    pads = next_power_of_two(pl.cdiv(tokens, num_tiles))
    kernel = functools.partial(
        _ragged_kernel, scale=scale, group=group, query_tile=query_tile, pads=pads, config=config
    )
    return pl.pallas_call(
        kernel,
        grid=(num_heads // config.heads, num_tiles),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_ragged",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        q,
        as_rows(kv),
        block_tables,
        context_lens,
        query_start,
        tile_seq,
        tile_start,
    )


def invariant_attention(q: jax.Array, kv: jax.Array, *plan, query_tile: int, **options) -> jax.Array:
    """`ragged_attention`, in which a query's result doesn't depend on its tile: where it lies, what else is in it."""
    config = prefill_config(q.shape[1] // kv.shape[3], q.shape[2], kv.dtype.itemsize, query_tile)
    return ragged_attention(q, kv, *plan, query_tile=query_tile, config=replace(config, mask_all=True), **options)


def _ragged_kernel(
    layer_ref,
    q_ref,
    kv_ref,
    tables_ref,
    lens_ref,
    starts_ref,
    tile_seq_ref,
    tile_start_ref,
    out_ref,
    *,
    scale: float,
    group: int,
    query_tile: int,
    pads: int,
    config: PrefillConfig,
):
    first_head, work = pl.program_id(0) * config.heads, pl.program_id(1)
    head_dim, rows, tile = q_ref.shape[2], query_tile * config.heads, config.tile
    _zero_pads(out_ref, starts_ref, work * pads, first_head, pads=pads, heads=config.heads)

    has_work = tile_seq_ref[work] >= 0
    seq = jnp.where(has_work, tile_seq_ref[work], 0)
    start = tile_start_ref[work]
    seq_end = starts_ref[seq + 1]
    end = jnp.where(has_work, jnp.minimum(start + query_tile, seq_end), start)
    offset = lens_ref[seq] - seq_end  # position of query token t is offset + t
    context = jnp.where(has_work, offset + end, 0)  # what the tile's last query sees

    token, query_head, column = _row_index(start, first_head, (rows, head_dim), config.heads)
    used = token < end
    q = plgpu.load(q_ref.at[token, query_head, column], mask=used, other=0.0)
    layer, head = layer_ref[0], lax.div(first_head, group)

    def step(index, state, causal: bool):
        first = index * tile
        limit = context if causal else None
        keys, values = load_kv_tile(kv_ref, tables_ref, layer, seq, head, first, limit, tile=tile)
        scores = dot(q, keys, trans_b=True) * (scale * LOG2_E)
        if causal:
            position = first + lax.broadcasted_iota(jnp.int32, (1, tile), 1)
            query = offset + start + lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), config.heads)
            scores = jnp.where(position <= query, scores, -jnp.inf)
        return online_softmax_step(state, scores, values)

    state = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, head_dim), jnp.float32),
    )
    num_tiles = pl.cdiv(context, tile)
    num_full = 0
    if not config.mask_all:
        num_full = jnp.minimum(lax.div(offset + start + 1, tile), num_tiles)  # wholly visible to the first query
        state = lax.fori_loop(0, num_full, functools.partial(step, causal=False), state)
    _, total, acc = lax.fori_loop(num_full, num_tiles, functools.partial(step, causal=True), state)
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    plgpu.store(out_ref.at[token, query_head, column], out.astype(out_ref.dtype), mask=used)


def _row_index(first_token, first_head, shape: tuple[int, int], heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token, head, column) [rows, D] of every element: row r is token first_token + r // heads, r % heads."""
    row = lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    token, head = first_token + lax.div(row, heads), first_head + lax.rem(row, heads)
    return (
        jnp.broadcast_to(token, shape),
        jnp.broadcast_to(head, shape),
        lax.broadcasted_iota(jnp.int32, shape, 1),
    )


def _zero_pads(out_ref, starts_ref, first, first_head, *, pads: int, heads: int) -> None:
    """Zeros for this program's share, tokens first..first+pads-1, as far as they lie behind the last query."""
    tokens, _, head_dim = out_ref.shape
    used = starts_ref[starts_ref.shape[0] - 1]

    @pl.when((first + pads > used) & (first < tokens))
    def _():
        shape = (pads * heads, head_dim)
        token, query_head, column = _row_index(first, first_head, shape, heads)
        mask = (token >= used) & (token < tokens)
        plgpu.store(out_ref.at[token, query_head, column], jnp.zeros(shape, out_ref.dtype), mask=mask)
