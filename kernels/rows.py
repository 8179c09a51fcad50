"""One row at a time: what makes plain jax independent of how many rows there are.

XLA picks code by shape: a product of one row and one of 64 sum in different orders. A loop over rows has one compiled
body, whose shapes don't depend on their number, and nothing is fused across its edge. Slow (each row reads the weights
again), and meant for where there are no kernels: the CPU. It must not know what is computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays (or trees of them) with equal first axes, applied to one row, [1, ...], after the other."""

    def mapped(*arrays: Any) -> Any:
        rows = jax.tree.leaves(arrays)[0].shape[0]
        if rows == 1:  # a loop of one turn would be unrolled, and its body fused with what surrounds it
            arrays = jax.tree.map(lambda array: jnp.concatenate([array, array]), arrays)
        parts = lax.map(lambda row: function(*jax.tree.map(lambda array: array[None], row)), arrays)
        return jax.tree.map(lambda part: part[:rows, 0], parts)

    return mapped
