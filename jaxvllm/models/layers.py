"""Building blocks of the models: norm, projection, rotary embedding, vocabulary-parallel embedding and head.

All shapes are local to a shard. A function that sums over shards takes the mesh axis' name, or None outside a mesh
(training scripts, experiments), where it is the plain operation.

Numerics: norms and rotary embedding in float32, products in the weights' dtype with float32 accumulation; dtype float32
means float32 (``dot_precision``), never TF32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.config import RopeConfig
from jaxvllm.kernels.precision import dot_precision


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its last axis (Zhang & Sennrich 2019, arXiv:1910.07467); float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weights: jax.Array, row: int | jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """(x + delta, its RMS norm with weights[row]), both [T, H]: a residual sum and the norm that follows it."""
    total = x + delta
    return total, rms_norm(total, weights[row], eps)


def project(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., K] times weight [N..., K] transposed -> [..., N...], both as Hugging Face stores them (out, in)."""
    flat = weight.reshape(-1, weight.shape[-1])
    y = lax.dot_general(
        x,
        flat,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def project_parts(x: jax.Array, weight: jax.Array, parts: int) -> jax.Array:
    """``project`` split over its inner dimension: x [T, K], weight [N, K] -> [parts, T, N] float32 that sum to it.

    A product of few rows has too few output tiles to fill a GPU; split, it has parts times as many, and the sum goes
    into the kernel that follows.
    """
    x, weight = (a.reshape(a.shape[0], parts, -1) for a in (x, weight))
    return lax.dot_general(
        x,
        weight,
        (((2,), (2,)), ((1,), (1,))),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.dtype(jnp.float32),
    )


def rope_tables(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, D/2] float32 for positions [T] int32.

    float32 throughout: bfloat16 would round position 257 to 256.
    """
    frequencies, scale = rope.frequencies(head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [T, heads, D]: the pair is (i, i + D/2), as in Hugging Face's checkpoints (not interleaved).

    cos, sin: [T, D/2] float32. Returns x's dtype.
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def silu_mul(gate_up: jax.Array) -> jax.Array:
    """gate_up [T, 2, N] -> silu(gate) * up [T, N] (Shazeer 2020, arXiv:2002.05202)."""
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def tp_sum(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum over the shards; one shard costs nothing (XLA would keep an all-reduce of one)."""
    return x if axis is None or lax.axis_size(axis) == 1 else lax.psum(x, axis)


def tp_max(x: jax.Array, axis: str | None) -> jax.Array:
    """Maximum over the shards, elementwise."""
    return x if axis is None or lax.axis_size(axis) == 1 else lax.pmax(x, axis)


def first_id(local_size: int, axis: str | None) -> int | jax.Array:
    """The global id of this shard's first vocabulary row: each shard owns ``local_size`` consecutive ones."""
    return 0 if axis is None or lax.axis_size(axis) == 1 else lax.axis_index(axis) * local_size


def in_slices[Out](function: Callable[[jax.Array, jax.Array], Out], hidden: jax.Array, targets: jax.Array,
                   size: int) -> Out:  # fmt: skip
    """function(hidden [T, H], targets [T]), ``size`` tokens at a time: the logits of 8192 tokens would be 5 GB.

    Every array that it returns has the tokens as its first axis.
    """
    tokens = hidden.shape[0]
    size = min(size, tokens)
    padded = -(-tokens // size) * size
    hidden = jnp.pad(hidden, ((0, padded - tokens), (0, 0))).reshape(-1, size, hidden.shape[-1])
    targets = jnp.pad(targets, (0, padded - tokens)).reshape(-1, size)
    parts = lax.map(lambda part: function(*part), (hidden, targets))
    return jax.tree.map(lambda part: part.reshape(padded, *part.shape[2:])[:tokens], parts)


def embed_tokens(table: jax.Array, token_ids: jax.Array, axis: str | None) -> jax.Array:
    """table [V_local, H], token_ids [T] int32 (global ids) -> this shard's part [T, H] of the embedded tokens.

    Each shard owns V_local consecutive ids: the others contribute zeros, and the sum over the shards has each row once.
    An id outside the vocabulary embeds as zeros.
    """
    local = token_ids - first_id(table.shape[0], axis)
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(mine, local, 0)]
    return jnp.where(mine[:, None], rows, jnp.zeros((), table.dtype))


def head_logits(table: jax.Array, hidden: jax.Array, project: Callable[..., jax.Array] = project) -> jax.Array:
    """hidden [..., H] -> this shard's logits [..., V_local] in float32."""
    return project(hidden, table, out_dtype=jnp.dtype(jnp.float32))


def token_logprobs(table: jax.Array, hidden: jax.Array, targets: jax.Array, *, vocab_size: int, axis: str | None,
                   slice_tokens: int = 256) -> jax.Array:  # fmt: skip
    """log softmax(head(hidden))[target]: hidden [T, H], targets [T] int32 global ids -> [T] float32."""
    start = first_id(table.shape[0], axis)
    ids = start + jnp.arange(table.shape[0])

    def one_slice(part: jax.Array, target: jax.Array) -> jax.Array:
        logits = jnp.where(ids < vocab_size, head_logits(table, part), -jnp.inf)
        peak = tp_max(jnp.max(logits, axis=-1), axis)
        total = tp_sum(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), axis)
        local = target - start
        mine = (local >= 0) & (local < table.shape[0])
        picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=-1)[:, 0]
        return tp_sum(jnp.where(mine, picked, 0.0), axis) - peak - jnp.log(total)

    return in_slices(one_slice, hidden, targets, slice_tokens)
