"""float32 as uint32 in the same order, for searches over the bits of floats; on scalars and arrays, in kernels too."""

import jax
import jax.numpy as jnp
from jax import lax

SIGN = 1 << 31


def float_key(value: jax.Array) -> jax.Array:
    """float32 -> uint32: a > b where the keys are (no NaN; -0.0 comes right before 0.0)."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(SIGN), ~bits, bits | jnp.uint32(SIGN))


def key_float(key: jax.Array) -> jax.Array:
    """The float32 of a key."""
    return lax.bitcast_convert_type(jnp.where(key >= jnp.uint32(SIGN), key ^ jnp.uint32(SIGN), ~key), jnp.float32)
