"""The machine that a kernel is traced for."""

import jax

_DEFAULT_NUM_SMS = 132  # H100 / H200


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that is traced for: the mesh's abstract device, else the first GPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores:
        return device.num_cores
    if jax.default_backend() == "gpu":
        return getattr(jax.devices()[0], "core_count", None) or _DEFAULT_NUM_SMS
    return _DEFAULT_NUM_SMS


def device_kind() -> str:
    """The kind of that GPU ("NVIDIA H200"), "" where there is none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind:
        return device.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else ""
