"""Order statistics of rows of float32 over a sharded vocabulary: thresholds and the top n, without a sort.

A sort and a loop can't be captured into a CUDA graph; what is here is reductions only (on a GPU: elsewhere the passes
are a loop, which compiles faster). Owns: the order of floats as integers, the search for thresholds, the top n.
Must not know: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvllm.kernels.float_order import float_key

BITS_PER_PASS = 3
"""ceil(32 / 3) = 11 passes over the values find a threshold; each compares with 7 candidates at once. About where an
H200 needs as long for the comparisons of a pass as for reading its values."""

COARSE_BITS = 12  # of a weight, for a first sum: 2^12 times 2^19 ids fit an int32

PIECE = 16
MAX_RANKED = 640  # values of which all pairs are compared

Total = Callable[[jax.Array], jax.Array]  # [B, ...] on each shard -> their sum


def sort_keys(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order: a > b exactly where the keys are, and 0.0 equals -0.0. No NaN, please."""
    return float_key(jnp.where(x == 0, 0.0, x))


def threshold(keys: jax.Array, weights: jax.Array, needed: jax.Array, total: Total, *, unroll: bool) -> jax.Array:
    """The largest t of each row such that the weights of the keys >= t sum up to at least ``needed``.

    keys [B, V_local] uint32; weights [B, V_local] int32 (with 1: the needed-th largest key) or float32, none negative;
    needed [B] of their dtype. Returns uint32 [B]; 0 where all weights together are less. So t is a key of the row: all
    equal to it stay with it. Most significant bits first; a pass reads keys and weights once and moves
    [B, 2^BITS_PER_PASS - 1] numbers between shards. unroll: no loop on the device (it compiles longer).
    """
    digits = jnp.arange(1, 1 << BITS_PER_PASS, dtype=jnp.uint32)
    zeros = [np.zeros((), weights.dtype)] * len(digits)

    def one_pass(number: Any, found: jax.Array) -> jax.Array:
        shift = jnp.maximum(32 - BITS_PER_PASS * (jnp.int32(number) + 1), 0).astype(jnp.uint32)
        candidates = found[:, None] + (digits << shift)  # the last pass may look too far: nothing is found there
        parts = [jnp.where(keys >= candidates[:, i, None], weights, 0) for i in range(len(zeros))]
        sums = lax.reduce(parts, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
        enough = total(jnp.stack(sums, axis=1)) >= needed[:, None]
        # sums fall from digit to digit, so that the last digit with enough is their number
        return found + (jnp.sum(enough, axis=1).astype(jnp.uint32) << shift)

    num_passes = -(-32 // BITS_PER_PASS)
    return lax.fori_loop(0, num_passes, one_pass, jnp.zeros(keys.shape[0], jnp.uint32), unroll=unroll or 1)


def nucleus(keys: jax.Array, weights: jax.Array, top_p: jax.Array, total: Total, *, unroll: bool) -> jax.Array:
    """The largest t of each row such that the keys >= t have at least top_p [B] of all weights; as ``threshold``."""
    mass = total(jnp.sum(weights, axis=-1))
    return threshold(keys, weights, top_p * mass, total, unroll=unroll)


def nucleus_in_whole_numbers(keys: jax.Array, weights: jax.Array, top_p: jax.Array, total: Total, *, unroll: bool
                             ) -> jax.Array:  # fmt: skip
    """``nucleus`` by sums of int32, which have one result in any order; weights float32 in 0..1, at most 2^19 ids.

    A weight is rounded to a multiple of 2^-30 of the row's mass, which is found from coarse to fine: at first only a
    bound is known that many small weights make loose.
    """
    count = total(jnp.sum(weights > 0, axis=-1, dtype=jnp.int32))
    scale = jnp.full(count.shape, 2.0**COARSE_BITS)
    for _ in range(2):
        bound = total(jnp.sum(_whole(weights, scale), axis=-1)) + count  # rounding takes at most half of 1 from each
        scale = scale * (2.0**30 / jnp.maximum(bound, 1).astype(jnp.float32))
    whole = _whole(weights, scale)
    mass = total(jnp.sum(whole, axis=-1))
    needed = jnp.ceil(top_p * mass.astype(jnp.float32)).astype(jnp.int32)
    return threshold(keys, whole, jnp.clip(needed, 1, mass), total, unroll=unroll)


def _whole(weights: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.round(weights * scale[:, None]).astype(jnp.int32)


def top_n(values: jax.Array, ids: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n largest of each row with their ids, in order; among equals the lowest id first.

    values [B, V] float32 without NaN; ids [B, V] or [1, V] int32, rising along a row. Returns ([B, n] float32, [B, n]
    int32); past the last of V values: -inf and -1.

    The row is cut into pieces of PIECE values. A value of the top n lies in one of the n pieces with the largest maxima
    (the first among equal ones), which are found in the same way; of few values all pairs are compared.
    """
    batch, size = values.shape
    if size <= max(MAX_RANKED, 2 * PIECE * n):
        return _ranked(values, jnp.broadcast_to(ids, (batch, size)), n)
    num_pieces = -(-size // PIECE)
    padding = ((0, 0), (0, num_pieces * PIECE - size))
    values = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(batch, num_pieces, PIECE)
    ids = jnp.pad(jnp.broadcast_to(ids, (batch, size)), padding, constant_values=-1)
    ids = ids.reshape(batch, num_pieces, PIECE)
    _, best = top_n(jnp.max(values, axis=-1), jnp.arange(num_pieces, dtype=jnp.int32)[None], n)
    chosen = best[:, :, None]
    values = jnp.take_along_axis(values, chosen, axis=1).reshape(batch, -1)
    ids = jnp.take_along_axis(ids, chosen, axis=1).reshape(batch, -1)
    return _ranked(values, ids, n)


def _ranked(values: jax.Array, ids: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """values, ids [B, C] -> the first n by (value falling, id rising). Padding has id -1 and comes last."""
    order = jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids)
    mine, other = values[:, :, None], values[:, None, :]
    before = (other > mine) | ((other == mine) & (order[:, None, :] < order[:, :, None]))
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    hit = (rank[:, None, :] == jnp.arange(n, dtype=jnp.int32)[None, :, None]) & (ids >= 0)[:, None, :]
    top_values = jnp.max(jnp.where(hit, values[:, None, :], -jnp.inf), axis=-1)
    top_ids = jnp.max(jnp.where(hit, ids[:, None, :], -1), axis=-1)
    return top_values, top_ids
