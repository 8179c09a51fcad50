"""One table of parameters per model family.

A ``ParamInfo`` declares everything that anybody asks about a parameter: its shape, which axis is sharded, how it is
initialised and which Hugging Face tensors it is made of. Conversion, loading, partition specs, random weights and byte
counts are all derived from the table, so that adding a family means writing one table and one forward.

Owns: the declarations and the nesting of the parameter tree. Must not know: meshes, files, devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Index = tuple[slice | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One Hugging Face tensor and the place it fills: ``dest[index]`` reshaped to ``shape`` is that tensor.

    ``repeat`` > 1: each slice along the destination's axis 0 is stored that many times (key/value heads replicated
    over more shards than there are heads); every repeat-th one is the tensor.
    """

    name: str
    shape: tuple[int, ...]
    index: Index = ()
    repeat: int = 1

    def place(self, dest: np.ndarray, tensor: np.ndarray) -> None:
        """Writes ``tensor`` (this source's shape) into its part of ``dest``."""
        part = dest[self.index]
        if self.repeat == 1:
            part[...] = tensor.reshape(part.shape)
        else:
            heads = tensor.reshape(part.shape[0] // self.repeat, *part.shape[1:])
            part[...] = np.repeat(heads, self.repeat, axis=0)

    def take(self, dest: np.ndarray) -> np.ndarray:
        """The Hugging Face tensor that ``dest`` holds."""
        return dest[self.index][:: self.repeat].reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter.

    path: its place in the tree, dots between levels ("layers.3.qkv"). shape: the global shape. axes: per axis "tp"
    where it is sharded, else None. init: standard deviation of the normal distribution, or None for ones.
    sources: the Hugging Face tensors that fill it; what they leave (vocabulary padding) is zero.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: float | None
    sources: tuple[Source, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def assemble(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The parameter on the host from its sources' tensors, without a copy where one tensor fills it exactly."""
        first = tensors[self.sources[0].name]
        if len(self.sources) == 1 and self.sources[0].repeat == 1 and first.size == self.size:
            return first.reshape(self.shape)
        dest = np.zeros(self.shape, first.dtype)
        for source in self.sources:
            source.place(dest, tensors[source.name])
        return dest


Table = dict[str, ParamInfo]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"layers.0.qkv": x, "embed": y} -> {"layers": ({"qkv": x},), "embed": y}, the tree that a forward takes."""
    tree: dict[str, Any] = {}
    layers: dict[int, dict[str, Any]] = {}
    for path, value in flat.items():
        head, _, rest = path.partition(".")
        if head == "layers":
            index, _, name = rest.partition(".")
            layers.setdefault(int(index), {})[name] = value
        else:
            tree[head] = value
    tree["layers"] = tuple(layers[i] for i in range(len(layers)))
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``nest``."""
    flat = {path: value for path, value in tree.items() if path != "layers"}
    for i, layer in enumerate(tree["layers"]):
        flat |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return flat


def per_device_size(table: Table, tp: int) -> int:
    """Elements that each of ``tp`` devices holds."""
    return sum(info.size // (tp if "tp" in info.axes else 1) for info in table.values())


def param_bytes(table: Table, itemsize: int) -> int:
    """Bytes of all parameters together, over all shards."""
    return sum(info.size for info in table.values()) * itemsize
