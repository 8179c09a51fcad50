"""Backend "triton", residual sum and RMS norm in one launch: one program a token, one pass over its row.

The summand may come in parts [S, T, H] float32: those of a product split over its inner dimension, added here in order.

The norm weights of all layers come stacked, with the row as an operand: a slice of them would be a copy, and a launch,
of its own. Memory traffic: both operands read once, the sum and its norm written once. Supported: any row length whose
padded row fits a program's registers (up to 16384 with 8 warps), float32 and bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .triton_tiles import next_power_of_two


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weights: jax.Array,
    row: int | jax.Array,
    *,
    eps: float,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x, delta [T, H] or parts [S, T, H], weights [R, H] -> (x + delta, rms_norm(x + delta) * weights[row]), [T, H]."""
    warps = num_warps or min(8, max(1, x.shape[1] // 512))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_norm_kernel, eps=eps),
        grid=(x.shape[0],),
        out_shape=(shape, shape),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(jnp.asarray(row, jnp.int32).reshape(1), x, delta.reshape(-1, *x.shape), weights)


def _norm_kernel(row_ref, x_ref, delta_ref, weights_ref, sum_ref, norm_ref, *, eps):
    token = pl.program_id(0)
    size, dtype = x_ref.shape[1], x_ref.dtype
    column = lax.iota(jnp.int32, next_power_of_two(size))
    exists = column < size
    x = plgpu.load(x_ref.at[token, column], mask=exists, other=0.0).astype(jnp.float32)
    delta = jnp.zeros(column.shape, jnp.float32)
    for part in range(delta_ref.shape[0]):
        delta += plgpu.load(delta_ref.at[part, token, column], mask=exists, other=0.0).astype(jnp.float32)
    delta = delta.astype(dtype).astype(jnp.float32)  # rounded as a whole product is
    total = (x + delta).astype(dtype)  # the residual stream is kept in x's dtype
    plgpu.store(sum_ref.at[token, column], total, mask=exists)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    weight = plgpu.load(weights_ref.at[row_ref[0], column], mask=exists, other=0.0).astype(jnp.float32)
    normed = ((wide * scale).astype(dtype).astype(jnp.float32) * weight).astype(dtype)
    plgpu.store(norm_ref.at[token, column], normed, mask=exists)
