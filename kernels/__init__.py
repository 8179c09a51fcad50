"""Paged attention over a block-structured KV cache: one API, several backends, jax only.

    kv            [L, 2, N, Hkv, P, D]  layers, keys/values, blocks, kv heads, block size, head_dim; float32 or bfloat16
    block_tables  [B, W] int32          the blocks of each sequence, in order; entries beyond its context are ignored
    slot          block * P + offset    one token's place in the cache

Query head h belongs to kv head h // G, with G = Hq / Hkv. The layer is an int or an int32 scalar array, so
that one compiled kernel serves all layers. Slots that no context covers may hold anything, NaN included.
`backend` is a concrete name (`resolve_backend` chooses); float32 is computed in float32 on every backend,
never TF32. In a step, write_kv of layer i + 1 has to depend on the attention of layer i (a model's data flow
does that): else XLA may order them the other way and copy the cache.
"""

import jax

from .backends import BACKENDS, ResolvedBackends, implementation, resolve_backend
from .precision import dot_precision, einsum
from .rows import by_row
from .shapes import check_decode, check_ragged, check_write

__all__ = [
    "BACKENDS",
    "ResolvedBackends",
    "add_rms_norm",
    "all_reduce_add_rms_norm",
    "best_of_shards",
    "by_row",
    "decode_attention",
    "dot_precision",
    "einsum",
    "filter_threshold",
    "gumbel_argmax",
    "log_sum",
    "matmul",
    "mixed_attention",
    "qk_norm_rope_write",
    "ragged_attention",
    "resolve_backend",
    "rope_tables",
    "rope_write",
    "silu_mul",
    "sum_exp",
    "write_kv",
]


def write_kv(
    kv: jax.Array,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """The cache with k[t], v[t] of a layer at slot slot_mapping[t]; in place inside a jit that donates kv.

    k, v [T, Hkv, D] in kv's dtype; slot_mapping int32 [T], unique where in range. Slots outside 0..N*P-1,
    negative ones too, are dropped: nothing of the cache changes. Raises ValueError listing every argument of
    a wrong shape or dtype.
    """
    check_write(kv, k, v, slot_mapping)
    return implementation("write_kv", backend)(kv, layer, k, v, slot_mapping)


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    arrivals: jax.Array,
    *,
    scale: float,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query a sequence over its first context_lens tokens, all written before: [B, Hq, D], arrivals.

    q [B, Hq, D] in kv's dtype; block_tables int32 [B, W]; context_lens int32 [B], at most W * P, 0 gives
    zeros. arrivals int32 [B, Hq]: zeros that come back as zeros, through which programs that share a row find each
    other; hand them from layer to layer, so that they are made once a step. Raises ValueError listing every argument
    of a wrong shape or dtype.
    """
    check_decode(q, kv, block_tables, context_lens, arrivals)
    function = implementation("decode_attention", backend)
    return function(q, kv, layer, block_tables, context_lens, arrivals, scale=scale)


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
    backend: str,
    invariant: bool = False,
) -> jax.Array:
    """Causal attention of packed queries, any number a sequence, over cached prefixes: [T, Hq, D]; pad tokens zero.

    q [T, Hq, D] in kv's dtype; query_start int32 [B + 1]: sequence b's queries are tokens query_start[b] ..
    query_start[b + 1] - 1 and the last ones of its context_lens[b] tokens, all written before. tile_seq,
    tile_start int32 [NT]: the work list. A tile is up to query_tile consecutive tokens of one sequence, from
    tile_start to at most the sequence's end; the tiles cover every query once; tile_seq -1 is no work.
    invariant: a query's result depends on nothing but itself and its context, to the last bit: not on its place in its
    tile, on the tile's other queries, or on how far their contexts go; query_tile has to be the same in every step.
    Raises ValueError listing every argument of a wrong shape or dtype.
    """
    check_ragged(q, kv, block_tables, context_lens, query_start, tile_seq, tile_start, query_tile)
    plan = block_tables, context_lens, query_start, tile_seq, tile_start
    function = implementation("invariant_attention" if invariant else "ragged_attention", backend)
    return function(q, kv, layer, *plan, scale=scale, query_tile=query_tile)


def mixed_attention(
    q: jax.Array, kv: jax.Array, layer: int | jax.Array, plan: tuple[jax.Array, ...], arrivals: jax.Array, *,
    scale: float, query_tile: int, backend: str,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`ragged_attention` where decoding rows are among the queries -> (its result, arrivals as of `decode_attention`).

    plan: `ragged_attention`'s block_tables, context_lens, query_start, tile_seq, tile_start.
    backend: `ResolvedBackends.mixed`.
    """
    tables, lens, query_start, tile_seq, tile_start = plan
    check_ragged(q, kv, tables, lens, query_start, tile_seq, tile_start, query_tile)
    function = implementation("mixed_attention", backend)
    return function(q, kv, layer, plan, arrivals, scale=scale, query_tile=query_tile)


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weights: jax.Array, row: int | jax.Array, *, eps: float, backend: str
) -> tuple[jax.Array, jax.Array]:
    """x, delta [T, H] of one dtype, weights [R, H] -> (x + delta, rms_norm(x + delta, eps) * weights[row]).

    delta may also be [S, T, H] float32: parts that are summed, in order, and rounded to x's dtype first.

    backend: a Triton one (`ResolvedBackends.fused`); elsewhere models compose it of plain jax.
    """
    return implementation("add_rms_norm", backend)(x, delta, weights, row, eps=eps)


def all_reduce_add_rms_norm(
    x: jax.Array,
    part: jax.Array,
    weights: jax.Array,
    row: int | jax.Array,
    peers: jax.Array,
    *,
    turn: int,
    capacity: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """`add_rms_norm` of x and the sum of all shards' parts [T, H], without an all-reduce of XLA; Hopper alone.

    peers: where the shards' buffers begin, turn and capacity: which part of them (`exchange_mosaic`).
    """
    function = implementation("all_reduce_add_rms_norm", "mosaic")
    return function(x, part, weights, row, peers, turn=turn, capacity=capacity, eps=eps)


def best_of_shards(values: jax.Array, ids: jax.Array, peers: jax.Array, *, offset: int, max_seqs: int) -> jax.Array:
    """values [B] float32, ids [B] int32, one candidate of each shard -> the id of the largest, the lowest of equals.

    The same [B] on all shards. peers: as above; offset: where the buffers' pairs begin, for max_seqs sequences.
    """
    return implementation("best_of_shards", "mosaic")(values, ids, peers, offset=offset, max_seqs=max_seqs)


def qk_norm_rope_write(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    slot_mapping: jax.Array,
    *,
    eps: float,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """From the fused projection to attention's operands: (q [T, Hkv * G, D], the cache with this step's k and v).

    qkv [T, Hkv, G + 2, D] in kv's dtype: G query lanes, key, value. Query and key lanes are RMS-normed over D with row
    `layer` of q_norm, k_norm [L, D] and rotated, pair (i, i + D/2), by cos, sin [T, D/2] float32. Slots as in
    `write_kv`, in place.
    backend: a Triton one (`ResolvedBackends.fused`); elsewhere models compose it of plain jax and `write_kv`.
    """
    function = implementation("qk_norm_rope_write", backend)
    return function(qkv, q_norm, k_norm, cos, sin, kv, layer, slot_mapping, eps=eps)


def rope_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    slot_mapping: jax.Array,
    *,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """`qk_norm_rope_write` for families without a norm on heads. backend: a Triton one."""
    return implementation("rope_write", backend)(qkv, cos, sin, kv, layer, slot_mapping)


def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: jax.typing.DTypeLike, backend: str) -> jax.Array:
    """x [T, K], weight [N, K] of one dtype -> x times weight transposed [T, N], each row the same among any others.

    backend: a Triton one; elsewhere `by_row` of a plain product.
    """
    return implementation("matmul", backend)(x, weight, out_dtype=out_dtype)


def silu_mul(gate_up: jax.Array, *, backend: str) -> jax.Array:
    """gate_up [T, 2, N] -> silu(gate_up[:, 0]) * gate_up[:, 1], rounded once. backend: a Triton one."""
    return implementation("silu_mul", backend)(gate_up)


def rope_tables(
    positions: jax.Array, frequencies: jax.Array, *, factor: float, backend: str
) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T], frequencies float32 [F] -> cos, sin of their products, times factor: float32 [T, F].

    backend: a Triton one.
    """
    return implementation("rope_tables", backend)(positions, frequencies, factor=factor)


def sum_exp(logits: jax.Array, peak: jax.Array, *, backend: str) -> jax.Array:
    """logits float32 [B, V], peak [B] -> sums of exp(logits - peak) in fixed pieces [B, C]. backend: a Triton one."""
    return implementation("sum_exp", backend)(logits, peak)


def log_sum(peak: jax.Array, pieces: jax.Array, *, backend: str) -> jax.Array:
    """peak [B], all shards' pieces of `sum_exp` [B, C] -> peak + log(their sum) [B]. backend: a Triton one."""
    return implementation("log_sum", backend)(peak, pieces)


def filter_threshold(
    logits: jax.Array,
    temperatures: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    log_min_p: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """The logit [B] float32 from which on a row's tokens stay under its three filters; -inf: all stay.

    logits [B, V] float32 without NaN; temperatures [B] float32, 0 counts as 1; top_k [B] int32: the k largest and their
    equals, 0: all; top_p [B] float32: of those, the fewest that have this share of softmax(logits / temperature), and
    the equals of the last, 1: all; log_min_p [B] float32: what is at most so far below the largest, times the
    temperature, -inf: all. min_p and top_k are applied before top_p.
    backend: a Triton one (`ResolvedBackends.fused`); elsewhere the processors compose it of plain jax.
    """
    function = implementation("filter_threshold", backend)
    return function(logits, temperatures, top_k, top_p, log_min_p)


def gumbel_argmax(
    logits: jax.Array,
    temperatures: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    start: int | jax.Array,
    *,
    vocab_size: int,
    backend: str,
    tiles: int | None = None,
    lows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The largest of logits + temperature * `noise.gumbel_noise` of each row: (value [B] float32, id [B] int32).

    logits [B, V] float32, column 0 of id `start`; temperatures [B] float32, 0 = no noise; seeds [B, 2] uint32;
    positions [B] int32. Ids from vocab_size on and NaN never win; of equals the lowest id does. tiles: of ids a
    program, None picks by the step's size. lows [B] float32: lower logits don't win either.
    backend: a Triton one (`ResolvedBackends.fused`); elsewhere the sampler composes it of plain jax.
    """
    function = implementation("gumbel_argmax", backend)
    return function(logits, temperatures, seeds, positions, start, vocab_size=vocab_size, tiles=tiles, lows=lows)
