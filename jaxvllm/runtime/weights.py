"""Puts parameters on the mesh: host arrays sharded as their table says, or random ones made on the devices.

Owns: placement. Must not know: files and formats (convert) or what a parameter means (models).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxvllm.models.params import Index, ParamInfo, Table
from jaxvllm.runtime.fuse import logical_shapes, make_fuse, make_fuse_into, problems_with, unchanged
from jaxvllm.runtime.mesh import sharding
from jaxvllm.runtime.upload import Upload

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # a tied model's state_dict has both, the same


class Read(Protocol):
    """A parameter that is read part by part (``convert.load.Parts``)."""

    dtype: np.dtype

    def __call__(self, index: Index) -> np.ndarray:
        """A part in host memory."""
        ...

    def stream(self, index: Index, send: Callable[[Any, int], None]) -> bool:
        """See ``Upload.place``."""
        ...


def make_place(mesh: Mesh, upload: Upload | None = None) -> Callable[[ParamInfo, Read], jax.Array]:
    """A function (info, read) -> sharded device array; ``read(index)`` gives the part that one device needs.

    ``place`` returns when the parts are there, so that their host memory can be used again; other parameters come
    meanwhile, since it is called from several threads (``convert.pace``). upload: how large parts travel, None:
    ``jax.device_put``.
    """

    @cache  # many parameters have one shape, and jax takes a while
    def spread(
        shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> tuple[NamedSharding, tuple[int, ...], Mapping[Any, Index | None], bool]:
        """The sharding, a part's shape, the index of each device's part, and whether no two have the same part."""
        target = sharding(mesh, axes)
        places = target.addressable_devices_indices_map(shape)
        return target, target.shard_shape(shape), places, len({str(index) for index in places.values()}) == len(places)

    def place(info: ParamInfo, read: Read) -> jax.Array:
        target, shape, places, each_its_own = spread(info.shape, info.axes)
        streams = upload is not None and each_its_own
        read_parts: dict[str, np.ndarray] = {}  # what several devices need is read once
        parts = []
        for device, index in places.items():
            assert index is not None
            part = upload.place(read.stream, index, shape, read.dtype, device) if upload and streams else None
            if part is None:
                if str(index) not in read_parts:
                    read_parts[str(index)] = read(index)
                part = jax.device_put(read_parts[str(index)], device)
            parts.append(part)
        return jax.block_until_ready(jax.make_array_from_single_device_arrays(info.shape, target, parts))

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


class ParamPlacer:
    """A trainer's parameters, checked, cast and put on the mesh as a table wants them.

    canonical: the model's table for one device, table: the mesh's. Compiles once for each kind of input that it gets.
    """

    def __init__(self, canonical: Table, table: Table, mesh: Mesh, dtype: str) -> None:
        self._canonical, self._table, self._mesh, self._dtype = canonical, table, mesh, dtype
        self._logical = logical_shapes(canonical)
        self._unchanged = unchanged(table)
        self._fuse, self._fuse_into = make_fuse(table, mesh, dtype), make_fuse_into(table, mesh, dtype)

    def check(self, params: Mapping[str, Any]) -> None:
        """Raises ValueError that lists every parameter that ``place`` couldn't take."""
        flat, shapes = self._flat(params)
        _raise_problems(problems_with(flat, shapes))

    def place(self, params: Mapping[str, Any], *, donate: bool, old: Mapping[str, jax.Array] | None = None
              ) -> dict[str, jax.Array]:  # fmt: skip
        """{path: array} of the table, none of them aliasing the caller's arrays.

        params, host or device arrays of any float dtype, as one of
          - the unfused logical tree: {Hugging Face name: array}, or nested dicts of its parts;
          - the tree that a forward takes (``params.nest``), or the same as {path: array}, in the canonical form
            (``param_table(config)``) whatever the mesh.
        donate: the first form's device arrays are used up. old: what an earlier call gave and nobody needs any more;
        its memory is used, so that there is no second copy. Raises ValueError as ``check`` does, before any of it.
        """
        flat, shapes = self._flat(params)
        _raise_problems(problems_with(flat, shapes))
        if old is not None:  # what was handed back to us can't be read and overwritten at once
            mine = {buffer for array in old.values() for buffer in _buffers(array)}
            flat = {name: jnp.copy(value) if mine & _buffers(value) else value for name, value in flat.items()}
        if shapes is self._logical:
            return self._place_logical(flat, donate, old)
        placed = {}
        for path in self._table:
            placed[path] = self._place_one(flat[path], path)
            if old is not None:
                old[path].delete()
        return placed

    def _flat(self, params: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
        """The parameters by name, and the shapes that they should have: logical or canonical."""
        if not isinstance(params, Mapping):
            raise ValueError(f"params is a {type(params).__name__}: give {{name: array}}, or the tree of a forward")
        flat = _joined(params)
        if any(isinstance(value, Tracer) for value in flat.values()):
            raise ValueError("params holds traced values: weights can't be handed over inside jit, grad or vmap")
        if HEAD in flat and HEAD not in self._logical and _same(flat[HEAD], flat.get(EMBEDDING)):
            flat = {name: value for name, value in flat.items() if name != HEAD}
        for shapes in (self._logical, {path: info.shape for path, info in self._canonical.items()}):
            if any(name in shapes for name in flat):
                return flat, shapes
        raise ValueError(
            f"these weights don't fit the model: no name is a Hugging Face name, like {next(iter(self._logical))}, or "
            f"a path, like {next(iter(self._canonical))}; there are {', '.join(list(flat)[:5]) or 'none'}"
        )

    def _place_logical(self, flat: Mapping[str, Any], donate: bool, old: Mapping[str, jax.Array] | None
                       ) -> dict[str, jax.Array]:  # fmt: skip
        values = {name: self._on_mesh(flat[name]) for name in self._logical}
        if old is not None:
            placed = self._fuse_into(old, values)
        else:
            given = {
                name: value
                for name, value in values.items()
                if donate and name in self._unchanged and isinstance(value, jax.Array) and value.dtype == self._dtype
            }
            placed = self._fuse(given, {name: value for name, value in values.items() if name not in given})
        for value in flat.values():
            if donate and isinstance(value, jax.Array) and not value.is_deleted():
                value.delete()  # its memory is free once it has been read
        return placed

    def _on_mesh(self, value: Any) -> Any:
        """A device array of other devices, or of these in another order, is moved first: one jitted call wants all on
        the same. A host array becomes one that jit takes."""
        value = self._reachable(value)
        if not isinstance(value, jax.Array):
            host = np.asarray(value)
            return host if host.dtype.isnative and host.dtype.itemsize <= 8 else host.astype(self._dtype)
        mesh = getattr(value.sharding, "mesh", None)
        order = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else tuple(value.sharding.device_set)
        return value if order == tuple(self._mesh.devices.flat) else jax.device_put(value, sharding(self._mesh))

    def _reachable(self, value: Any) -> Any:
        """For a mesh of several processes: an array on this one's devices goes by the host, as jax moves it to no other
        process's."""
        mine = self._mesh.is_multi_process and isinstance(value, jax.Array) and value.is_fully_addressable
        return np.asarray(value) if mine else value

    def _place_one(self, value: Any, path: str) -> jax.Array:
        value = self._reachable(value)
        info, dtype, target = self._table[path], self._dtype, sharding(self._mesh, self._table[path].axes)
        if info.shape == self._canonical[path].shape:
            # a copy: device_put onto several devices may keep the given buffer as one of its parts
            ours = jnp.array(value, dtype) if isinstance(value, jax.Array) else np.asarray(value).astype(dtype)
            return jax.device_put(ours, target)
        host = np.asarray(value).astype(dtype)  # heads replicated or vocabulary padded for this mesh
        whole = info.assemble({s.name: s.take(host) for s in self._canonical[path].sources})
        return jax.device_put(whole, target)


def _same(one: Any, other: Any) -> bool:
    return one is other or (np.shape(one) == np.shape(other) and bool(jnp.array_equal(one, other)))


def _buffers(value: Any) -> set[tuple[Any, int]]:
    """(device, address) of a device array's parts, whatever object they are seen through."""
    if not isinstance(value, jax.Array):
        return set()
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in value.addressable_shards}


def _joined(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, and lists of dicts -> {"a.b.0.c": leaf}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            flat |= {f"{name}.{rest}": leaf for rest, leaf in _joined(value).items()}
        else:
            flat[str(name)] = value
    return flat


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ValueError(f"these weights don't fit the model: {'; '.join(problems)}")
