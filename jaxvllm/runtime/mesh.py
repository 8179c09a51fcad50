"""An engine's mesh and the only shard_map of the project.

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
    """A one-axis mesh over the first ``tensor_parallel_size`` devices (or the given ones).

    Raises ConfigError when there are fewer devices, or when there are several processes and those first devices aren't
    of all of them. ``jax.make_mesh`` isn't used: it makes explicit-type axes, which shard_map refuses to mix (0.11.2).
    """
    if devices is None:
        devices = jax.devices()
        owners = {device.process_index for device in devices[:tensor_parallel_size]}
        if len(devices) >= tensor_parallel_size and len(owners) < jax.process_count():
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size}: of the {jax.process_count()} processes only "
                f"{sorted(owners)} own a device of these; pass tensor_parallel_size={len(devices)} for all devices, or "
                'for an engine in each process mesh=Mesh(jax.local_devices(), ("tp",))'
            )
    devices = list(devices)
    if len(devices) < tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs that many devices, but {len(devices)} "
            f"({devices[0].device_kind}) are here: lower it"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TP,))


def check_mesh(mesh: Mesh) -> None:
    """Raises ConfigError unless ``mesh`` is one of distinct devices whose only axis of size > 1 is "tp"."""
    check_devices(mesh)
    others = [name for name, size in mesh.shape.items() if name != TP and size > 1]
    if others or TP not in mesh.shape:
        raise ConfigError(
            f'mesh has the axes {dict(mesh.shape)}, but an engine shares one model over one axis "tp": pass the '
            'devices of one replica, e.g. Mesh(devices[i : i + 2], ("tp",)) to the engine of each data-parallel one'
        )


def check_devices(mesh: Mesh) -> None:
    """Raises ConfigError unless ``mesh`` is one of at least one device, each of them once."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(f'mesh is a {type(mesh).__name__}; pass jax.sharding.Mesh(devices, ("tp",))')
    devices = list(mesh.devices.flat)
    twice = sorted({str(device) for device in devices if devices.count(device) > 1})
    if twice or not devices:
        wrong = f"has {', '.join(twice)} more than once" if twice else "has no devices"
        raise ConfigError(f"mesh {wrong}: each shard of the model needs a device of its own")


def sharding(mesh: Mesh, axes: tuple[str | None, ...] = ()) -> NamedSharding:
    """axes: per array axis "tp" or None; () means replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def spmd(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``function`` on local shapes, once per device of the mesh.

    check_vma=False: with the check, jax 0.11.2 refuses the one-device shortcut of a sum and every pallas_call. That
    outputs declared as replicated really are is tested (tp 1 = 2 = 4 = 8).
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
