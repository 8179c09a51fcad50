"""Attention without a cache, for training and experiments: one sequence, every key at hand, a causal mask.

The engine's attention is paged (jaxvllm.kernels); the model's forward takes either as its `attend`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxvllm.config import ModelConfig
from jaxvllm.kernels.precision import dot_precision


def causal_attend(
    config: ModelConfig, layer: int | jax.Array, q: jax.Array, k: jax.Array | None, v: jax.Array | None, carry: None
) -> tuple[jax.Array, None]:
    """q [S, Hq, D], k and v [S, Hkv, D] of ONE sequence -> [S, Hq, D] in v's dtype; use vmap for a batch.

    Scores and softmax in float32, a [Hq, S, S] array: for short sequences. The heads' numbers come from the
    arrays, so that a shard's share of them works too; query heads h = kv_head * G + g.
    """
    assert k is not None and v is not None  # None only from kernels that write them to a cache
    length, kv_heads, precision = q.shape[0], k.shape[1], dot_precision(q.dtype)
    grouped = q.reshape(length, kv_heads, q.shape[1] // kv_heads, config.head_dim)
    scores = jnp.einsum("shgd,thd->hgst", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores * config.head_dim**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum("hgst,thd->shgd", weights.astype(v.dtype), v, precision=precision)
    return out.reshape(q.shape), carry
