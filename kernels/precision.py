"""The one owner of dot precision: float32 means float32 in every product, on every backend.

On an NVIDIA GPU jax's default precision and Triton's dot use TF32 (10 mantissa bits) for float32 operands.
Every dot of this folder, and of the models above it, asks here. It must not know what is multiplied.
"""

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = 1.4426950408889634  # a softmax in base 2: exp(x) = exp2(x * LOG2_E)


def dot_precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """The `precision=` of a dot whose operands have `dtype`: HIGHEST for float32, None (native) for 16-bit types."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two operands of one dtype (float32 or bfloat16), accumulated and returned in float32."""
    return jnp.einsum(spec, a, b, precision=dot_precision(a.dtype), preferred_element_type=jnp.float32)
