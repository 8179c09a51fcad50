"""What a step's numbers are computed with: plain jax and XLA's choice, or sums that no other row can change.

A batch-invariant engine's promise rests on this file: `numerics_of` replaces whatever XLA would compute by the shape of
the step. On Triton every sum over a row is a kernel of ours, whose programs have one row or a fixed tile of rows; what
is left to XLA is gathers, selects, maxima, whole numbers and single operations an element, which have one result.
Elsewhere a loop computes one row after the other (`by_row`). Must not know requests, buckets, the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.config import RopeConfig
from jaxvllm.kernels import ResolvedBackends, by_row, log_sum, matmul, rope_tables, silu_mul, sum_exp
from jaxvllm.models import layers
from jaxvllm.models.arithmetic import PLAIN, Arithmetic
from jaxvllm.runtime.select import nucleus, nucleus_in_whole_numbers

SAMPLE_TILES = 4  # of ids a program: fixed, not by the step's size


def peaks(logits: jax.Array, axis: str | None) -> jax.Array:
    """The largest of logits [B, V_local] over all shards: [B]; finite, also for a row of -inf only."""
    peak = layers.tp_max(jnp.max(logits, axis=-1), axis)
    return jnp.maximum(peak, jnp.finfo(jnp.float32).min)


def log_norm(logits: jax.Array, axis: str | None) -> jax.Array:
    """log sum exp of logits [B, V_local] over all shards: [B], what a log-probability lies below its logit."""
    peak = peaks(logits, axis)
    return peak + jnp.log(layers.tp_sum(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), axis))


def _as_it_is[T](x: T) -> T:
    return x


@dataclass(frozen=True, slots=True)
class Numerics:
    """The defaults are what every engine but a batch-invariant one computes with.

    arithmetic: the forward's. rows: makes a function of rows what is applied to them. settle: ends a chain of
    elementwise operations, so that all who read the result read the same numbers. log_norm: as the one below.
    nucleus: as those of `select`. sample_tiles: see ``kernels.gumbel_argmax``.
    """

    arithmetic: Arithmetic = PLAIN
    rows: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    settle: Callable[[jax.Array], jax.Array] = _as_it_is
    log_norm: Callable[[jax.Array, str | None], jax.Array] = log_norm
    nucleus: Callable[..., jax.Array] = nucleus
    sample_tiles: int | None = None


ORDINARY = Numerics()


def numerics_of(backends: ResolvedBackends) -> Numerics:
    """Of a step on these backends."""
    if not backends.invariant:
        return ORDINARY
    fixed = Numerics(settle=lax.optimization_barrier, nucleus=nucleus_in_whole_numbers, sample_tiles=SAMPLE_TILES)
    if backends.fused is None:
        return replace(fixed, arithmetic=_arithmetic_by_row(), rows=by_row)
    kernels = _arithmetic_of_kernels(backends.fused)
    return replace(fixed, arithmetic=kernels, log_norm=partial(_log_norm, backend=backends.fused))


def _arithmetic_by_row() -> Arithmetic:
    def project(x: jax.Array, weight: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        return by_row(lambda row: layers.project(row, weight, out_dtype=out_dtype))(x)

    def add_rms_norm(x: jax.Array, delta: jax.Array, weights: jax.Array, row: Any, *, eps: float) -> Any:
        return by_row(lambda x, delta: layers.add_rms_norm(x, delta, weights, row, eps=eps))(x, delta)

    def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return by_row(lambda row: layers.rms_norm(row, weight, eps))(x)

    def tables(positions: jax.Array, rope: RopeConfig, head_dim: int) -> Any:
        return by_row(lambda position: layers.rope_tables(position, rope, head_dim))(positions)

    return Arithmetic(project, add_rms_norm, rms_norm, tables, by_row(layers.apply_rope), by_row(layers.silu_mul),
                      ordered_sum)  # fmt: skip


def _arithmetic_of_kernels(backend: str) -> Arithmetic:
    """Norms and rotations aren't here: ``dense.Fused`` has them."""

    def project(x: jax.Array, weight: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        y = matmul(x, weight.reshape(-1, weight.shape[-1]), out_dtype=out_dtype or x.dtype, backend=backend)
        return y.reshape(x.shape[0], *weight.shape[:-1])

    def tables(positions: jax.Array, rope: RopeConfig, head_dim: int) -> Any:
        frequencies, factor = rope.frequencies(head_dim)
        return rope_tables(positions, jnp.asarray(frequencies, jnp.float32), factor=factor, backend=backend)

    return Arithmetic(project=project, rope_tables=tables, silu_mul=partial(silu_mul, backend=backend),
                      tp_sum=ordered_sum)  # fmt: skip


def ordered_sum(x: jax.Array, axis: str | None) -> jax.Array:
    """``tp_sum`` in the shards' order, in float32, rounded once.

    An all-reduce sums in an order that depends on an element's place in the buffer and on the buffer's size.
    """
    if axis is None or lax.axis_size(axis) == 1:
        return x
    total, *others = lax.all_gather(x, axis).astype(jnp.float32)
    for other in others:
        total = total + other
    return total.astype(x.dtype)


def _log_norm(logits: jax.Array, axis: str | None, *, backend: str) -> jax.Array:
    peak = peaks(logits, axis)
    pieces = sum_exp(logits, peak, backend=backend)
    if axis is not None and lax.axis_size(axis) > 1:
        pieces = lax.all_gather(pieces, axis, axis=1, tiled=True)
    return log_sum(peak, pieces, backend=backend)
