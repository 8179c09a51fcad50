"""The all-reduces of a step, alone: as many as it has, each on the sum before.

A step sums [tokens, hidden] over the devices twice a layer: after attention's output projection and after the MLP's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from bench.ceilings import median_s
from jaxvllm.runtime.mesh import TP, spmd

type AllReduce = Callable[[jax.Array], jax.Array]
"""[tokens, hidden] of this device -> the sum over the mesh's axis TP. Called inside shard_map, on local shapes."""


def _psum(mesh: Mesh) -> AllReduce:
    return lambda x: lax.psum(x, TP)


ALL_REDUCES: dict[str, Callable[[Mesh], AllReduce]] = {"psum": _psum}
"""By the name that --all-reduce gives. Another implementation is a line here: a function of the mesh, so that it can
make what it needs once, outside of the compiled chain."""


def chain(mesh: Mesh, all_reduce: AllReduce | None, links: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(x [devices, tokens, hidden], scale []) -> its device's part after `links` sums, each scaled; None: only scaled.

    The barriers keep one launch a link in both, so that their difference is the all-reduces'.
    """

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x[0]
        for _ in range(links):
            if all_reduce is not None:
                x = all_reduce(x)
            x = lax.optimization_barrier(x * scale)
        return x[None]

    parts = PartitionSpec(TP)
    return spmd(local, mesh, (parts, PartitionSpec()), parts)


def all_reduces_s(
    mesh: Mesh, name: str, shape: tuple[int, int], dtype: str, links: int, *, repeats: int, calls: int
) -> float:
    """Seconds of `links` dependent all-reduces of `shape`, [tokens, hidden], in one compiled function; 0 on one device.

    Raises ValueError for a name that isn't known, RuntimeError for sums that are wrong.
    """
    if name not in ALL_REDUCES:
        raise ValueError(f"all_reduce={name!r} is unknown; known: {', '.join(ALL_REDUCES)}")
    if mesh.size == 1:
        return 0.0
    placed = jax.NamedSharding(mesh, PartitionSpec(TP))
    x = jax.device_put(jnp.ones((mesh.size, *shape), dtype), placed)
    scale = jax.device_put(jnp.asarray(1 / mesh.size, dtype), jax.NamedSharding(mesh, PartitionSpec()))
    times = []
    for all_reduce in (ALL_REDUCES[name](mesh), None):
        compiled = jax.jit(chain(mesh, all_reduce, links)).lower(x, scale).compile()
        times.append(median_s(lambda run=compiled: run(x, scale), repeats=repeats, calls=calls))
        # ones, summed and divided by a power of two, stay ones; alone they are scaled each time
        if all_reduce is not None and mesh.size & (mesh.size - 1) == 0 and not bool((compiled(x, scale) == 1).all()):
            raise RuntimeError(f"all_reduce={name!r} sums wrongly over {mesh.size} devices")
    return times[0] - times[1]
