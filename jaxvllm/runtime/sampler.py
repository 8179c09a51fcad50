"""Gumbel-max sampling over a sharded vocabulary, without gathering logits.

argmax_i(z_i / T + G_i) with G ~ Gumbel(0, 1) is a draw from softmax(z / T) (Gumbel 1954; Maddison et al. 2014). Scaled
by T it is argmax_i(z_i + T * G_i): no division, finite at every temperature, and T = 0 is greedy decoding without a
second code path. Each shard takes the best of its own ids; the (value, id) pairs are reduced over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.kernels import gumbel_argmax
from jaxvllm.kernels.noise import gumbel_noise
from jaxvllm.models.layers import first_id, tp_max


def sample(logits: jax.Array, temperatures: jax.Array, seeds: jax.Array, positions: jax.Array,
           lows: jax.Array | None = None, *, vocab_size: int, axis: str | None = None, backend: str | None = None,
           tiles: int | None = None, best_of: Callable[[jax.Array, jax.Array], jax.Array] | None = None
           ) -> jax.Array:  # fmt: skip
    """One token per row, the same on every shard.

    logits [B, V_local] float32; temperatures [B] float32 (0 = greedy); seeds [B, 2] uint32 (low, high word of the
    request's seed); positions [B] int32 (number of tokens before the new one); vocab_size: ids at and above it are
    padding and never sampled; lows [B] float32: neither are lower logits; backend: of the fused kernel
    (`ResolvedBackends.fused`), None composes it of plain jax; tiles: the kernel's. best_of: (values [B], ids [B]) of
    this shard's candidates -> the winners' ids, the same on all shards; None: by XLA's all-reduces.
    Returns ids [B] int32; equal values give the lowest id at any number of shards.
    """
    start = first_id(logits.shape[-1], axis)
    if backend is None:
        if lows is not None:
            logits = jnp.where(logits >= lows[:, None], logits, -jnp.inf)
        value, winner = _best(logits, temperatures, seeds, positions, start, vocab_size)
    else:
        value, winner = gumbel_argmax(logits, temperatures, seeds, positions, start, vocab_size=vocab_size,
                                      backend=backend, tiles=tiles, lows=lows)  # fmt: skip
    if axis is None or lax.axis_size(axis) == 1:
        return winner
    if best_of is not None:
        return best_of(value, winner)
    peak = tp_max(value, axis)
    return lax.pmin(jnp.where(value == peak, winner, jnp.iinfo(jnp.int32).max), axis)


def _best(logits: jax.Array, temperatures: jax.Array, seeds: jax.Array, positions: jax.Array,
          start: int | jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The shard's best (value [B], global id [B]) in plain jax."""
    ids = start + jnp.arange(logits.shape[-1], dtype=jnp.int32)
    noise = gumbel_noise(seeds, positions, ids)
    # beyond 1e30 every finite logit is nothing beside the noise, and the product must not overflow
    values = logits + jnp.minimum(temperatures, 1e30)[:, None] * noise
    # a NaN would win every comparison or none; it loses here, and a row of nothing else yields its lowest id
    values = jnp.where((ids < vocab_size) & ~jnp.isnan(values), values, -jnp.inf)
    best = jnp.argmax(values, axis=-1).astype(jnp.int32)
    return jnp.take_along_axis(values, best[:, None], axis=-1)[:, 0], start + best
