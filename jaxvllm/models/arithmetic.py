"""What a forward computes its rows with: the seam at which a batch-invariant engine puts its own sums.

Owns the list of operations that a family may use on rows and their plain versions. Must not know which engine asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxvllm.models import layers


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Each is called as the function of ``layers`` that is its default."""

    project: Callable[..., jax.Array] = layers.project
    add_rms_norm: Callable[..., tuple[jax.Array, jax.Array]] = layers.add_rms_norm
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = layers.rms_norm
    rope_tables: Callable[..., tuple[jax.Array, jax.Array]] = layers.rope_tables
    apply_rope: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = layers.apply_rope
    silu_mul: Callable[[jax.Array], jax.Array] = layers.silu_mul
    tp_sum: Callable[[jax.Array, str | None], jax.Array] = layers.tp_sum


PLAIN = Arithmetic()
