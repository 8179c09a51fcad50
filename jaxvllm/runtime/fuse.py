"""A model's weights as the separate matrices that everybody knows, made into the fused and sharded ones of a table.

One jitted function for the whole tree: XLA fuses, casts, replicates, pads and reshards in one go, and may reuse the
given arrays' memory. Owns: that function. Must not know: files, engines.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxvllm.models.params import ParamInfo, Table
from jaxvllm.runtime.mesh import sharding


def logical_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the unfused tensors, by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight")."""
    return {source.name: source.shape for info in table.values() for source in info.sources}


def problems_with(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is missing, unknown, gone, no number or of another shape in ``tensors``; empty if they fit."""
    found = [f"{name} is missing" for name in shapes if name not in tensors]
    found += [f"{name} is unknown" for name in tensors if name not in shapes]
    for name in shapes:
        value = tensors.get(name, 0)
        if isinstance(value, jax.Array) and value.is_deleted():
            found.append(f"{name} has been deleted or donated")
            continue
        dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
            found.append(f"{name} is of dtype {dtype}")
    return found + [
        f"{name} has shape {tuple(np.shape(tensors[name]))}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(np.shape(tensors[name])) != shape
    ]


def make_fuse(table: Table, mesh: Mesh, dtype: str) -> Callable[..., dict[str, jax.Array]]:
    """A jitted function (donated, others), each {logical name: array} -> {path: array} of ``table``, placed as it says.

    donated: those whose memory becomes the result's; each must be in ``unchanged``, in ``dtype``. Compiled at its first
    call, and again only for another division into the two, or other shardings or dtypes.
    """

    def fuse(donated: Mapping[str, jax.Array], others: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return _fused(table, {**donated, **others}, jnp.dtype(dtype), donated)

    return jax.jit(fuse, out_shardings=_shardings(table, mesh), donate_argnums=(0,))


def make_fuse_into(table: Table, mesh: Mesh, dtype: str) -> Callable[..., dict[str, jax.Array]]:
    """A jitted function (old {path: array}, {logical name: array}) -> the table's arrays, in the old ones' memory."""

    def fuse(old: Mapping[str, jax.Array], tensors: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return _fused(table, tensors, jnp.dtype(dtype), ())

    return jax.jit(fuse, out_shardings=_shardings(table, mesh), donate_argnums=(0,), keep_unused=True)


def _shardings(table: Table, mesh: Mesh) -> dict[str, NamedSharding]:
    return {path: sharding(mesh, info.axes) for path, info in table.items()}


def _fused(table: Table, tensors: Mapping[str, jax.Array], dtype: Any, donated: Container[str]
           ) -> dict[str, jax.Array]:  # fmt: skip
    made = {}
    for path, info in table.items():
        value = _assemble(info, tensors, dtype)
        # without the copy jit would hand an unchanged array through: the caller's own
        made[path] = value if info.sources[0].name in donated else jnp.copy(value)
    return made


def unchanged(table: Table) -> frozenset[str]:
    """Names of the tensors that are a parameter of the table as they are."""
    alone = (info for info in table.values() if len(info.sources) == 1)
    return frozenset(info.sources[0].name for info in alone if info.sources[0].shape == info.shape)


def _assemble(info: ParamInfo, tensors: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """As ``ParamInfo.assemble`` does on the host."""
    first = tensors[info.sources[0].name]
    if len(info.sources) == 1 and info.sources[0].repeat == 1 and first.size == info.size:
        return first.reshape(info.shape).astype(dtype)
    dest = jnp.zeros(info.shape, dtype)
    for source in info.sources:
        part = jax.eval_shape(lambda d, index=source.index: d[index], dest).shape
        tensor = tensors[source.name].astype(dtype)
        if source.repeat == 1:
            tensor = tensor.reshape(part)
        else:
            heads = tensor.reshape(part[0] // source.repeat, *part[1:])
            tensor = jnp.repeat(heads, source.repeat, axis=0)
        dest = dest.at[source.index].set(tensor)
    return dest
