"""Counter-based Gumbel noise: plain uint32 arithmetic, the same numbers in XLA and in kernels.

The noise of a token is a pure function of (the request's seed, the token's position, the candidate's vocabulary id):
the same in any batch, row, bucket, shard and after any preemption. The generator is Philox-4x32 with 10 rounds
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = the 64-bit seed, counter = (index, position),
four words a call. Four ids share a call, LANES apart, so that a kernel reads four runs of consecutive logits for one:

    id      | higher bits | word, 2 bits | lane, 9 bits |
    index   |        higher bits         |     lane     |   and the id's noise is this word of the call

Changing it changes everybody's seeded outputs. (Until version 0.2 it was Threefry-2x32-20, one word a call: 72
instructions a word where Philox takes 15.)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

LANES = 512
WORDS = 4
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def mulhi(x: jax.Array, y: jax.Array) -> jax.Array:
    """The high 32 bits of the product of two uint32 arrays (`lax.mulhi` doesn't get through shard_map in jax 0.11)."""
    half, low = jnp.uint32(16), jnp.uint32(0xFFFF)
    cross = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
    carry = (x & low) * (y >> half) + (cross & low)
    return (x >> half) * (y >> half) + (cross >> half) + (carry >> half)


def philox4x32(
    key: tuple[jax.Array, jax.Array],
    counter: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    mulhi: Callable[[jax.Array, jax.Array], jax.Array] = mulhi,
    *,
    unroll: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Philox-4x32-10 of uint32 arrays that broadcast together -> four uint32 arrays. mulhi: high word of a product.

    unroll: the rounds one after the other, which runs faster; otherwise a loop: a tenth of the operations to compile.
    """

    def round_(_: object, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        c0, c1, c2, c3, k0, k1 = state
        m0, m1 = (jnp.uint32(m) for m in _MULTIPLIERS)
        high0, low0, high1, low1 = mulhi(c0, m0), c0 * m0, mulhi(c2, m1), c2 * m1
        weyl0, weyl1 = (jnp.uint32(w) for w in _WEYL)
        return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0, k0 + weyl0, k1 + weyl1

    state = (*counter, *key)
    if unroll:
        for _ in range(_ROUNDS):
            state = round_(None, state)
    else:
        state = lax.fori_loop(0, _ROUNDS, round_, tuple(jnp.broadcast_arrays(*state)))
    c0, c1, c2, c3, *_ = state
    return c0, c1, c2, c3


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
    ids = ids.astype(jnp.uint32)[None, :]
    index = ids // (WORDS * LANES) * LANES + ids % LANES
    zero = jnp.zeros((), jnp.uint32)
    key = seeds[:, 0, None], seeds[:, 1, None]
    counter = index, positions.astype(jnp.uint32)[:, None], zero, zero
    words = philox4x32(key, counter, unroll=jax.default_backend() != "cpu")
    word = ids // LANES % WORDS
    bits = jnp.where(word < 2, jnp.where(word == 0, words[0], words[1]), jnp.where(word == 2, words[2], words[3]))
    return gumbel_from_bits(bits)
