"""Puts parameters on the mesh: host arrays sharded as their table says, or random ones made on the devices.

Owns: placement. Must not know: files and formats (convert) or what a parameter means (models).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxvllm.models.params import Index, ParamInfo, Table, flatten
from jaxvllm.runtime.mesh import sharding


def make_place(mesh: Mesh) -> Callable[[ParamInfo, Callable[[Index], np.ndarray]], jax.Array]:
    """A function (info, read) -> sharded device array; ``read(index)`` gives the part that one device needs.

    Returns when the parts are on their devices, so that their host memory can be reused.
    """

    def place(info: ParamInfo, read: Callable[[Index], np.ndarray]) -> jax.Array:
        def part(index: Index | None) -> np.ndarray:
            assert index is not None
            return read(index)

        return jax.block_until_ready(jax.make_array_from_callback(info.shape, sharding(mesh, info.axes), part))

    return place


def random_params(table: Table, mesh: Mesh, dtype: str, seed: int) -> dict[str, jax.Array]:
    """Parameters drawn on the devices: normal with each ParamInfo's deviation, ones for norms.

    A parameter's values depend on (seed, path) only, not on the mesh. One compilation per distinct shape.
    """
    params = {}
    root = jax.random.key(seed)
    for path, info in table.items():
        target = sharding(mesh, info.axes)
        key = jax.random.fold_in(root, zlib.crc32(path.encode()))
        params[path] = _init(key, info.shape, jnp.dtype(dtype), info.init, target)
    return params


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _init(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, std: float | None, target: NamedSharding
) -> jax.Array:
    values = jnp.ones(shape, dtype) if std is None else (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
    return jax.lax.with_sharding_constraint(values, target)


def place_params(params: Mapping[str, Any], canonical: Table, table: Table, mesh: Mesh, dtype: str
                 ) -> dict[str, jax.Array]:  # fmt: skip
    """A trainer's parameters, checked, cast and put on the mesh; its own arrays are copied, never aliased.

    params: the tree that a forward takes (``params.nest``) or the same as {path: array}, in the canonical form
    (``param_table(config)``) whatever the mesh; host or device arrays. Raises ValueError that lists every missing,
    unknown and mis-shaped parameter.
    """
    flat = flatten(params) if "layers" in params else dict(params)
    problems = [f"{path} is missing" for path in canonical if path not in flat]
    problems += [f"{path} is unknown" for path in flat if path not in canonical]
    problems += [
        f"{path} has shape {tuple(np.shape(flat[path]))}, not {info.shape}"
        for path, info in canonical.items()
        if path in flat and tuple(np.shape(flat[path])) != info.shape
    ]
    if problems:
        raise ValueError(f"these weights don't fit the model: {'; '.join(problems)}")
    placed = {}
    for path, info in table.items():
        value = flat[path]
        if info.shape == canonical[path].shape:
            cast = jnp.asarray(value, dtype) if isinstance(value, jax.Array) else np.asarray(value).astype(dtype)
            placed[path] = jax.device_put(cast, sharding(mesh, info.axes), may_alias=False)
        else:  # heads replicated or vocabulary padded for this mesh
            host = np.asarray(value).astype(dtype)
            whole = info.assemble({s.name: s.take(host) for s in canonical[path].sources})
            placed[path] = jax.device_put(whole, sharding(mesh, info.axes))
    return placed
