"""Which table a checkpoint is checked against, names of dtypes as numpy knows them, and parameters as host arrays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxvllm.config import ModelConfig
from jaxvllm.convert.memory import Lease
from jaxvllm.models.params import Index, ParamInfo, Table
from jaxvllm.models.registry import param_table

# Stored dtypes that we read, by their safetensors name. float16 is kept as it is and cast when it is loaded.
FLOAT_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def canonical_table(config: ModelConfig) -> Table:
    """The table of a model's parameters as checkpoints store them (tp = 1)."""
    return param_table(config)


def host_dtype(dtype: DTypeLike) -> np.dtype:
    """A numpy dtype from a name ("bfloat16" too) or from anything numpy takes, such as jax's types."""
    return np.dtype(ml_dtypes.bfloat16) if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)


def allocate(info: ParamInfo, dtype: np.dtype, lease: Lease) -> np.ndarray:
    """Memory for a parameter: zeros where its sources leave something (vocabulary padding), else uninitialised."""
    dest = lease.empty(info.shape, dtype)
    if not covered(info):
        dest[...] = 0
    return dest


def covered(info: ParamInfo) -> bool:
    """Whether a parameter's sources leave nothing of it."""
    return sum(math.prod(s.shape) * s.repeat for s in info.sources) == info.size


def slices_of(info: ParamInfo, index: Index) -> tuple[slice, ...]:
    """An index of slices with their beginnings and ends."""
    return tuple(slice(*s.indices(n)) for s, n in zip(index, info.shape, strict=True) if isinstance(s, slice))


def part_shape(info: ParamInfo, index: Index) -> tuple[int, ...]:
    """The shape of a parameter's part."""
    return tuple(s.stop - s.start for s in slices_of(info, index))


def cut_from_whole(read: Callable[[], np.ndarray], lease: Lease) -> Callable[[Index], np.ndarray]:
    """A function index -> contiguous part of what ``read`` gives, which is called once, at the first part."""
    lock, whole = threading.Lock(), []

    def cut(index: Index) -> np.ndarray:
        with lock:
            if not whole:
                whole.append(read())
        part = whole[0][index]
        if part.flags.c_contiguous:
            return part
        copy = lease.empty(part.shape, part.dtype)
        copy[...] = part
        return copy

    return cut
