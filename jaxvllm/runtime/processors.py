"""Logit processors: masks, bias, penalties, then the filters min_p, top_k and top_p.

Vectorised over rows with different wishes and over a sharded vocabulary; reductions only, no sort, no branch, no loop
on a GPU, so that all of it is one captured graph. What a request wants in numbers comes as knobs (`core.knobs`);
what it wants by vocabulary id or word lies in `ProcessorState`, by row, on the device.

Owns: the state and its updates, and what the sampler sees. Must not know: requests, plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvllm.core.knobs import KNOBS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jaxvllm.kernels import filter_threshold
from jaxvllm.kernels.float_order import key_float
from jaxvllm.models.layers import first_id, tp_max, tp_sum
from jaxvllm.runtime.mesh import TP, sharding
from jaxvllm.runtime.numerics import ORDINARY, Numerics
from jaxvllm.runtime.select import sort_keys, threshold

IN_PROMPT, IS_END, ONE_OUTPUT = 1, 2, 4  # counts: two flags, then the number of times in the output


@struct.dataclass
class ProcessorState:
    """By row of the device (R rows), for those whose requests have ``row_state``; stale for the others.

    counts   [R, V] int32    IN_PROMPT | IS_END | ONE_OUTPUT * (times in the output), sharded over V
    bias     [R, V] float32  added to the logits; -inf where a token isn't allowed; sharded over V
    recent   [R, K - 1] int32     the last output tokens, oldest first; -1: none
    words    [R, MAX_BAD_WORDS, K] int32  forbidden sequences, right-aligned, -1 before them (K = MAX_BAD_WORD_TOKENS)
    """

    counts: jax.Array
    bias: jax.Array
    recent: jax.Array
    words: jax.Array


PROCESSOR_SPECS = ProcessorState(
    counts=P(None, TP), bias=P(None, TP), recent=P(None, None), words=P(None, None, None)  # type: ignore[arg-type]
)  # fmt: skip


def processor_shapes(mesh: Mesh, num_rows: int, vocab_size: int) -> ProcessorState:
    """The state as ShapeDtypeStructs with shardings; the vocabulary is padded to a multiple of the shards."""
    padded = -(-vocab_size // mesh.size) * mesh.size

    def leaf(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes))

    return ProcessorState(
        counts=leaf((num_rows, padded), jnp.int32, (None, TP)),
        bias=leaf((num_rows, padded), jnp.float32, (None, TP)),
        recent=leaf((num_rows, MAX_BAD_WORD_TOKENS - 1), jnp.int32),
        words=leaf((num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), jnp.int32),
    )


def processor_bytes(num_rows: int, vocab_size: int, tp: int) -> int:
    """Bytes of the state on one device."""
    words = 2 * -(-vocab_size // tp) + MAX_BAD_WORD_TOKENS - 1 + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
    return 4 * num_rows * words


def set_row(state: ProcessorState, row: jax.Array, new: ProcessorState) -> ProcessorState:
    """The state with row ``row`` (int32 scalar) replaced by ``new``, whose leaves lack the axis of rows."""
    return jax.tree.map(lambda old, one: lax.dynamic_update_index_in_dim(old, one, row, 0), state, new)


def unpack_words(words: jax.Array, table: Sequence[tuple[str, str]] = KNOBS) -> dict[str, jax.Array]:
    """words [B, len(table)] int32 -> {name: [B]}, each in its dtype; table: (name, dtype) of each word."""
    return {
        name: words[:, i] if dtype == "int32" else lax.bitcast_convert_type(words[:, i], jnp.dtype(dtype))
        for i, (name, dtype) in enumerate(table)
    }


def process(logits: jax.Array, knobs: dict[str, jax.Array], state: ProcessorState, rows: jax.Array,
            positions: jax.Array, temperatures: jax.Array, *, vocab_size: int, axis: str | None,
            unroll: bool, numerics: Numerics = ORDINARY, backend: str | None = None
            ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The model's logits; those with all applied but filters and temperature; and from where on [B] the filters keep.

    So the sampler draws from the second, at or above the third.

    logits [B, V_local] float32; knobs from ``unpack_words``; rows [B] int32 (pads past the last row); positions [B]
    int32: tokens before the sampled one; temperatures [B] float32; backend: of `kernels.filter_threshold`, None
    composes it of plain jax. In both logits NaN and ids at and above vocab_size are -inf; nothing else happens to rows
    with neutral knobs.
    """
    ids = first_id(logits.shape[-1], axis) + jnp.arange(logits.shape[-1], dtype=jnp.int32)
    logits = jnp.where((ids < vocab_size) & ~jnp.isnan(logits), logits, -jnp.inf)
    changed = numerics.settle(apply_row_state(logits, knobs, state, rows, positions, ids))
    if backend is not None and (axis is None or lax.axis_size(axis) == 1):
        lows = filter_threshold(changed, temperatures, knobs["top_k"], knobs["top_p"], knobs["log_min_p"],
                                backend=backend)  # fmt: skip
    else:
        lows = filter_lows(changed, knobs, temperatures, axis=axis, unroll=unroll, numerics=numerics)
    return logits, changed, lows


def apply_row_state(logits: jax.Array, knobs: dict[str, jax.Array], state: ProcessorState, rows: jax.Array,
                    positions: jax.Array, ids: jax.Array) -> jax.Array:  # fmt: skip
    """Allowed ids, bad words, end tokens too early, bias, penalties: in this order, for rows with ``row_state``."""
    rows = jnp.minimum(rows, state.counts.shape[0] - 1)
    counts, bias = state.counts[rows], state.bias[rows]
    early = (counts & IS_END != 0) & (positions < knobs["ends_from"])[:, None]
    masked = early | bad_word_mask(state.words[rows], state.recent[rows], ids)
    changed = jnp.where(masked, -jnp.inf, logits + bias)
    times = (counts // ONE_OUTPUT).astype(jnp.float32)
    seen = counts & ~IS_END != 0
    repetition = jnp.where(seen, knobs["repetition_penalty"][:, None], 1.0)
    changed = jnp.where(changed > 0, changed / repetition, changed * repetition)
    changed = changed - knobs["frequency_penalty"][:, None] * times
    changed = changed - jnp.where(times > 0, knobs["presence_penalty"][:, None], 0.0)
    return jnp.where((knobs["row_state"] != 0)[:, None], changed, logits)


def bad_word_mask(words: jax.Array, recent: jax.Array, ids: jax.Array) -> jax.Array:
    """bool [B, V_local]: ids that would complete a forbidden sequence. words [B, N, K], recent [B, K - 1]."""
    prefix, last = words[:, :, :-1], words[:, :, -1]
    begun = jnp.all((prefix < 0) | (prefix == recent[:, None, :]), axis=-1)
    last = jnp.where(begun & (last >= 0), last, -1)
    local = last - ids[0]
    inside = (last >= 0) & (local >= 0) & (local < ids.shape[0])
    places = jnp.where(inside, local, ids.shape[0])  # past the end: dropped
    batch = jnp.broadcast_to(jnp.arange(words.shape[0])[:, None], places.shape)
    return jnp.zeros((words.shape[0], ids.shape[0]), bool).at[batch, places].set(True, mode="drop")


def filter_lows(logits: jax.Array, knobs: dict[str, jax.Array], temperatures: jax.Array, *,
                axis: str | None, unroll: bool, numerics: Numerics = ORDINARY) -> jax.Array:  # fmt: skip
    """min_p, top_k and top_p: the lowest logit [B] that they keep, or -inf. What stays is all above, ties included.

    Everything is decided on the logits: dividing by the temperature doesn't change their order. logits: no NaN.
    """
    total = partial(tp_sum, axis=axis)
    keys = sort_keys(logits)
    peak = tp_max(jnp.max(logits, axis=-1), axis)[:, None]
    scale = jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    # exp((z - peak) / T); the difference of equal infinities would be NaN
    weights = numerics.settle(jnp.exp(jnp.where(logits == peak, 0.0, logits - peak) / scale))

    log_min_p = knobs["log_min_p"][:, None]
    low = jnp.where(log_min_p > -jnp.inf, sort_keys(numerics.settle(peak + scale * log_min_p)), 0)
    wanted = jnp.where(knobs["top_k"] > 0, knobs["top_k"], jnp.iinfo(jnp.int32).max)
    ones = jnp.ones(keys.shape, jnp.int32)
    low = jnp.maximum(low, threshold(keys, ones, wanted, total, unroll=unroll)[:, None])

    left = jnp.where(keys >= low, weights, 0.0)
    nucleus = numerics.nucleus(keys, left, knobs["top_p"], total, unroll=unroll)
    low = jnp.maximum(low[:, 0], jnp.where(knobs["top_p"] < 1, nucleus, 0))
    return key_float(jnp.maximum(low, sort_keys(jnp.full(low.shape, -jnp.inf))))


def count_tokens(state: ProcessorState, rows: jax.Array, tokens: jax.Array, axis: str | None) -> ProcessorState:
    """The state after tokens [B] were sampled for rows [B]; rows past the last one are dropped."""
    size = state.counts.shape[-1]
    local = tokens - first_id(size, axis)
    places = jnp.where((local >= 0) & (local < size), local, size)  # past the end: another shard's
    counts = state.counts.at[rows, places].add(ONE_OUTPUT, mode="drop")
    before = state.recent[jnp.minimum(rows, state.recent.shape[0] - 1)]
    recent = state.recent.at[rows].set(jnp.concatenate([before[:, 1:], tokens[:, None]], axis=1), mode="drop")
    return state.replace(counts=counts, recent=recent)  # type: ignore[attr-defined]


def host_row(prompt: np.ndarray, output: np.ndarray, *, vocab_size: int, padded: int, end_ids: np.ndarray,
             logit_bias: dict[int, float], allowed: np.ndarray | None, words: list[tuple[int, ...]]
             ) -> ProcessorState:  # fmt: skip
    """One request's row of the state, in numpy: everything that it said and wants, as of its known tokens.

    prompt, output int32 ids; end_ids: what min_tokens masks; allowed: ids, None for all; words: forbidden sequences of
    1 to MAX_BAD_WORD_TOKENS ids, at most MAX_BAD_WORDS. padded: the state's vocabulary size.
    """
    counts = np.bincount(output, minlength=padded).astype(np.int32) * ONE_OUTPUT
    counts[prompt] |= IN_PROMPT
    counts[end_ids[end_ids < vocab_size]] |= IS_END
    bias = np.zeros(padded, np.float32)
    if allowed is not None:
        bias[:] = -np.inf
        bias[allowed] = 0
    if logit_bias:
        bias[list(logit_bias)] += np.array(list(logit_bias.values()), np.float32)
    recent = np.full(MAX_BAD_WORD_TOKENS - 1, -2, np.int32)  # no id, and no wildcard
    tail = output[-len(recent) :]
    recent[len(recent) - len(tail) :] = tail
    table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for i, word in enumerate(words):
        table[i, MAX_BAD_WORD_TOKENS - len(word) :] = word
    return ProcessorState(counts=counts, bias=bias, recent=recent, words=table)  # type: ignore[arg-type]
