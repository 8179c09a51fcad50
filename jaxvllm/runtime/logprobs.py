"""Log-probabilities of chosen tokens and of the most probable ones, over a sharded vocabulary.

Owns: the normalisation, ranks and the merge of shards. Must not know: requests, which logits these are.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.models.layers import first_id, head_logits, in_slices, tp_sum
from jaxvllm.runtime.numerics import ORDINARY, Numerics
from jaxvllm.runtime.select import top_n


def gather_logprobs(logits: jax.Array, tokens: jax.Array, num_top: int, *, axis: str | None,
                    numerics: Numerics = ORDINARY) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """log softmax(logits) of one token a row and of the ``num_top`` most probable ones, the same on every shard.

    logits [B, V_local] float32 without NaN, -inf for what can't come; tokens [B] int32 global ids. Returns float32 and
    int32 [B, 1 + num_top]: first the token's log-probability and its rank (1: nothing is more probable; equals count),
    then the top ones and their ids, the lowest id first among equals.
    """
    size = logits.shape[-1]
    start = first_id(size, axis)
    norm = numerics.log_norm(logits, axis)
    local = tokens - start
    mine = (local >= 0) & (local < size)
    picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=-1)
    chosen = tp_sum(jnp.where(mine[:, None], picked, 0.0), axis)
    rank = tp_sum(jnp.sum(logits >= chosen, axis=-1, dtype=jnp.int32), axis)[:, None]
    if num_top == 0:
        return chosen - norm[:, None], rank
    ids = start + jnp.arange(size, dtype=jnp.int32)[None]
    values, ids = top_n(logits, ids, num_top)
    if axis is not None and lax.axis_size(axis) > 1:
        values = lax.all_gather(values, axis, axis=1, tiled=True)
        values, ids = top_n(values, lax.all_gather(ids, axis, axis=1, tiled=True), num_top)
    return jnp.concatenate([chosen, values], axis=1) - norm[:, None], jnp.concatenate([rank, ids], axis=1)


def prompt_logprobs(table: jax.Array, hidden: jax.Array, targets: jax.Array, num_top: int, *, vocab_size: int,
                    axis: str | None, slice_tokens: int = 64, numerics: Numerics = ORDINARY
                    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """``gather_logprobs`` of head(hidden [T, H]) for targets [T] int32, each [T, 1 + num_top]."""
    ids = first_id(table.shape[0], axis) + jnp.arange(table.shape[0])

    def one_slice(part: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head_logits(table, part, numerics.arithmetic.project)
        logits = jnp.where((ids < vocab_size) & ~jnp.isnan(logits), logits, -jnp.inf)
        gather = partial(gather_logprobs, num_top=num_top, axis=axis, numerics=numerics)
        return numerics.rows(gather)(logits, target)

    return in_slices(one_slice, hidden, targets, slice_tokens)
