"""The mesh of local devices and the only shard_map of the project.

Tensor parallelism is always on, also over one device: one code path. Owns: which devices, how a ParamInfo's axes become
a sharding. Must not know: models, plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.config import ConfigError

TP = "tp"


def make_mesh(tensor_parallel_size: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A one-axis mesh over the first ``tensor_parallel_size`` local devices (or the given ones).

    Raises ConfigError when there are fewer devices. ``jax.make_mesh`` isn't used: it makes explicit-type axes, which
    shard_map refuses to mix (jax 0.11.2).
    """
    devices = list(jax.local_devices() if devices is None else devices)
    if len(devices) < tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs that many devices, but {len(devices)} "
            f"({devices[0].device_kind}) are here: lower it"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TP,))


def sharding(mesh: Mesh, axes: tuple[str | None, ...] = ()) -> NamedSharding:
    """axes: per array axis "tp" or None; () means replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def spmd(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``function`` on local shapes, once per device of the mesh.

    check_vma=False: with the check, jax 0.11.2 refuses the one-device shortcut of a sum and every pallas_call. That
    outputs declared as replicated really are is tested (tp 1 = 2 = 4 = 8).
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
