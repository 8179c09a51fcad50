"""Counter-based Gumbel noise: plain uint32 arithmetic that XLA and Pallas kernels can both call.

The noise of a token is a pure function of (the request's seed, the token's position, the candidate's vocabulary id):
the same in any batch, row, bucket, shard and after any preemption. The generator is Threefry-2x32 with 20 rounds
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = the 64-bit seed, counter = (position, id).
It is a decision for good: changing it changes everybody's seeded outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _rotate_left(x: jax.Array, bits: int) -> jax.Array:
    return (x << jnp.uint32(bits)) | (x >> jnp.uint32(32 - bits))


def threefry2x32(
    key0: jax.Array, key1: jax.Array, counter0: jax.Array, counter1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of uint32 arrays that broadcast together -> two uint32 arrays of their common shape."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, bits) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """uint32 bits -> Gumbel(0, 1) float32, finite for every input.

    G = -log(E), E = -log1p(-u) ~ Exp(1), u = (bits + 1/2) / 2^32. All 32 bits count: small u, which make the large
    noise that decides, keep their full relative precision (23 bits would cap the noise at 16.6; here 22.9). u is kept
    below 1 - 2^-24, where float32 would round it to 1.
    """
    # bits >> 1 fits a signed integer, which every backend converts to float32; the last bit is added back
    high = (bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-31)
    low = (bits & jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-32)
    u = jnp.minimum(high + low + jnp.float32(2.0**-33), jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-u))


def gumbel_noise(seeds: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """seeds [B, 2] uint32 (low, high word), positions [B] int32, ids [V] int32 -> noise [B, V] float32."""
    bits, _ = threefry2x32(
        seeds[:, 0, None],
        seeds[:, 1, None],
        positions.astype(jnp.uint32)[:, None],
        ids.astype(jnp.uint32)[None, :],
    )
    return gumbel_from_bits(bits)
