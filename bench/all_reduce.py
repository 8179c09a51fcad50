"""The all-reduces of a step, alone: as many as it has, each on the sum before.

A step sums [tokens, hidden] over the devices twice a layer: after attention's output projection and after the MLP's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from bench.ceilings import median_s
from jaxvllm.kernels import all_reduce_add_rms_norm
from jaxvllm.runtime.exchange import Exchange, allocate_exchange, devices_reach_each_other, wrong_device
from jaxvllm.runtime.mesh import TP, spmd

type AllReduce = Callable[[jax.Array, int, Exchange | None], jax.Array]
"""([tokens, hidden] of this device, the link's number, what the exchange needs) -> the sum over the mesh's axis TP.

Called inside shard_map, on local shapes."""


def _psum(x: jax.Array, link: int, exchange: Exchange | None) -> jax.Array:
    return lax.psum(x, TP)


def _exchange(x: jax.Array, link: int, exchange: Exchange | None) -> jax.Array:
    """The norms' kernel, with a residual of zeros; its time has the norm in it."""
    assert exchange is not None
    zeros, weights = jnp.zeros_like(x), jnp.ones((1, x.shape[1]), x.dtype)
    turn = 2 if link < 0 else link % 2
    return all_reduce_add_rms_norm(zeros, x, weights, 0, exchange.peers, turn=turn, capacity=exchange.capacity,
                                   eps=1e-6)[0]  # fmt: skip


ALL_REDUCES: dict[str, AllReduce] = {"psum": _psum, "exchange": _exchange}
"""By the name that --all-reduce gives."""


def chain(mesh: Mesh, all_reduce: AllReduce | None, links: int, exchange: Exchange | None = None
          ) -> Callable[[jax.Array, jax.Array, Exchange | None], jax.Array]:  # fmt: skip
    """(x [devices, tokens, hidden], scale [], exchange) -> its device's part after `links` sums, each scaled.

    all_reduce None: only scaled. The barriers keep one launch a link in both, so that their difference is the
    all-reduces'.
    """

    def local(x: jax.Array, scale: jax.Array, exchange: Exchange | None) -> jax.Array:
        x = x[0]
        for link in range(links):
            if all_reduce is not None:
                x = all_reduce(x, link if link < links - 1 else -1, exchange)
            x = lax.optimization_barrier(x * scale)
        return x[None]

    parts = PartitionSpec(TP)
    return spmd(local, mesh, (parts, PartitionSpec(), jax.tree.map(lambda _: parts, exchange)), parts)


def can_exchange(mesh: Mesh) -> bool:
    """Whether the exchange's kernel runs on these devices."""
    devices = list(mesh.devices.flat)
    return not wrong_device(devices) and devices_reach_each_other(devices)


def all_reduces_s(
    mesh: Mesh, name: str, shape: tuple[int, int], dtype: str, links: int, *, repeats: int, calls: int
) -> float:
    """Seconds of `links` dependent all-reduces of `shape`, [tokens, hidden], in one compiled function; 0 on one device.

    Raises ValueError for a name that isn't known or can't run here, RuntimeError for sums that are wrong.
    """
    if name not in ALL_REDUCES:
        raise ValueError(f"all_reduce={name!r} is unknown; known: {', '.join(ALL_REDUCES)}")
    if mesh.size == 1:
        return 0.0
    placed = jax.NamedSharding(mesh, PartitionSpec(TP))
    x = jax.device_put(jnp.ones((mesh.size, *shape), dtype), placed)
    scale = jax.device_put(jnp.asarray(1 / mesh.size, dtype), jax.NamedSharding(mesh, PartitionSpec()))
    exchange = None
    if name == "exchange":
        if not can_exchange(mesh):
            raise ValueError("all_reduce='exchange' needs Hopper GPUs that reach each other's memory")
        exchange = allocate_exchange(mesh, shape[1] * x.dtype.itemsize, shape[0], 1)
    times = []
    for all_reduce in (ALL_REDUCES[name], None):
        compiled = jax.jit(chain(mesh, all_reduce, links, exchange)).lower(x, scale, exchange).compile()
        times.append(median_s(lambda run=compiled: run(x, scale, exchange), repeats=repeats, calls=calls))
        # ones, summed and divided by a power of two, stay ones; alone they are scaled each time
        right = all_reduce is None or mesh.size & (mesh.size - 1) or bool((compiled(x, scale, exchange) == 1).all())
        if not right:
            raise RuntimeError(f"all_reduce={name!r} sums wrongly over {mesh.size} devices")
    return times[0] - times[1]
