"""Backend "triton", what stands between the products of a batch-invariant engine: activation, angles, normalisation.

Each program has one row, or a fixed piece of one, so that nothing depends on how many rows there are. XLA would fuse
these with what surrounds them and choose the order of a row's sum, and which products and sums become one rounding, by
shape. Memory traffic: every operand and result once. Supported: any sizes, float32 and bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .triton_tiles import next_power_of_two

TILE = 1024  # elements that a program looks at at once
TILES = 8  # of a row's sum: one program


def _launch(kernel, grid: tuple[int, ...], out, name: str, interpret: bool):
    params = plgpu.CompilerParams(num_warps=4, num_stages=1)
    return pl.pallas_call(
        kernel, grid=grid, out_shape=out, compiler_params=params, interpret=interpret, name=f"invariant_{name}"
    )


def silu_mul(gate_up: jax.Array, *, interpret: bool = False) -> jax.Array:
    """gate_up [T, 2, N] -> silu(gate) * up [T, N], rounded to its dtype once (Shazeer 2020, arXiv:2002.05202)."""
    tokens, _, size = gate_up.shape
    out = jax.ShapeDtypeStruct((tokens, size), gate_up.dtype)
    return _launch(_silu_kernel, (pl.cdiv(size, TILE), tokens), out, "silu_mul", interpret)(gate_up)


def _silu_kernel(gate_up_ref, out_ref):
    token, column = pl.program_id(1), pl.program_id(0) * TILE + lax.iota(jnp.int32, TILE)
    exists = column < out_ref.shape[1]
    gate, up = (
        plgpu.load(gate_up_ref.at[token, part, column], mask=exists, other=0.0).astype(jnp.float32) for part in (0, 1)
    )
    value = gate / (1.0 + jnp.exp(-gate)) * up
    plgpu.store(out_ref.at[token, column], value.astype(out_ref.dtype), mask=exists)


def rope_tables(
    positions: jax.Array, frequencies: jax.Array, *, factor: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T], frequencies float32 [F] -> cos and sin of their products, times factor: float32 [T, F]."""
    out = jax.ShapeDtypeStruct((*positions.shape, *frequencies.shape), jnp.float32)
    kernel = functools.partial(_rope_kernel, factor=factor)
    return _launch(kernel, positions.shape, (out, out), "rope_tables", interpret)(positions, frequencies)


def _rope_kernel(positions_ref, frequencies_ref, cos_ref, sin_ref, *, factor: float):
    token, size = pl.program_id(0), frequencies_ref.shape[0]
    column = lax.iota(jnp.int32, next_power_of_two(size))
    exists = column < size
    frequency = plgpu.load(frequencies_ref.at[column], mask=exists, other=0.0)
    angle = positions_ref[token].astype(jnp.float32) * frequency
    plgpu.store(cos_ref.at[token, column], jnp.cos(angle) * factor, mask=exists)
    plgpu.store(sin_ref.at[token, column], jnp.sin(angle) * factor, mask=exists)


def sum_exp(logits: jax.Array, peak: jax.Array, *, interpret: bool = False) -> jax.Array:
    """logits [B, V] float32, peak [B] -> the sums of exp(logits - peak) in pieces: float32 [B, pieces]."""
    rows, size = logits.shape
    pieces = pl.cdiv(size, TILE * TILES)
    out = jax.ShapeDtypeStruct((rows, pieces), jnp.float32)
    return _launch(_sum_exp_kernel, (pieces, rows), out, "sum_exp", interpret)(logits, peak)


def _sum_exp_kernel(logits_ref, peak_ref, out_ref):
    piece, row = pl.program_id(0), pl.program_id(1)
    peak, size = peak_ref[row], logits_ref.shape[1]

    def step(index, total):
        column = (piece * TILES + index) * TILE + lax.iota(jnp.int32, TILE)
        logits = plgpu.load(logits_ref.at[row, column], mask=column < size, other=-jnp.inf)
        return total + jnp.exp(logits - peak)

    out_ref[row, piece] = jnp.sum(lax.fori_loop(0, TILES, step, jnp.zeros((TILE,), jnp.float32)))


def log_sum(peak: jax.Array, pieces: jax.Array, *, interpret: bool = False) -> jax.Array:
    """peak [B], pieces [B, C] of `sum_exp`, of all shards -> peak + log of their sum: float32 [B]."""
    out = jax.ShapeDtypeStruct(peak.shape, jnp.float32)
    return _launch(_log_sum_kernel, peak.shape, out, "log_sum", interpret)(peak, pieces)


def _log_sum_kernel(peak_ref, pieces_ref, out_ref):
    row, size = pl.program_id(0), pieces_ref.shape[1]
    piece = lax.iota(jnp.int32, next_power_of_two(size))
    out_ref[row] = peak_ref[row] + jnp.log(jnp.sum(plgpu.load(pieces_ref.at[row, piece], mask=piece < size, other=0.0)))
