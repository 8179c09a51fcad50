"""Which implementation runs: the table of backends and the choice for a device.

Owns the names ("reference", "xla", "triton", "triton_interpret") and what each can do. It must not know how a
kernel works: an implementation is a module of this folder with a function of the operation's name. A new
backend is a new file, a line in the table and a rule in `_refusal`.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .shapes import FLOAT_DTYPES

OPERATIONS = ("write_kv", "decode_attention", "ragged_attention")
_MODULES = {
    "reference": dict.fromkeys(OPERATIONS, "reference"),
    "xla": dict.fromkeys(OPERATIONS, "xla"),
    "triton": {  # the last three are its alone: elsewhere they are composed of plain jax
        "write_kv": "kv_write_triton",
        "decode_attention": "decode_triton",
        "ragged_attention": "prefill_triton",
        "add_rms_norm": "norm_triton",
        "qk_norm_rope_write": "qkv_write_triton",
        "gumbel_argmax": "sample_triton",
    },
}
_INTERPRETED = {"triton_interpret": "triton"}  # runs anywhere, slowly, through XLA: for tests
BACKENDS = (*_MODULES, *_INTERPRETED)
_MIN_TRITON_CAPABILITY = 80  # bfloat16 dots


@dataclass(frozen=True, slots=True)
class ResolvedBackends:
    """One concrete backend name per operation, and why ("" when it is simply what was asked for)."""

    write_kv: str
    decode_attention: str
    ragged_attention: str
    reason: str

    @property
    def fused(self) -> str | None:
        """The backend of the fused elementwise kernels, or None: compose them of plain jax."""
        return self.write_kv if self.write_kv.startswith("triton") else None


def resolve_backend(
    name: str,
    *,
    platform: str,
    head_dim: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    device_kind: str = "",
    compute_capability: str = "",
) -> ResolvedBackends:
    """The backends that run for a request of `name` ("auto" or a name of BACKENDS) on a device.

    platform is the device's ("cpu", "gpu"/"cuda"), device_kind its `device_kind` (for the reason),
    compute_capability its `compute_capability` ("9.0"; "" is taken to be new enough). A backend that can't
    run there gives way to "xla", operation by operation, with a reason to log. Raises ValueError for an
    unknown name or dtype.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention_backend is {name!r}; known are 'auto', {', '.join(map(repr, BACKENDS))}")
    if jnp.dtype(dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; the kernels support {', '.join(FLOAT_DTYPES)}")
    if block_size < 1 or head_dim < 1:
        raise ValueError(f"block_size is {block_size} and head_dim {head_dim}; both have to be at least 1")
    wanted = "triton" if name == "auto" else name
    device = device_kind or platform
    chosen, refusals = {}, []
    for operation in OPERATIONS:
        refusal = _refusal(wanted, operation, platform, head_dim, compute_capability)
        chosen[operation] = "xla" if refusal else wanted
        if refusal and refusal not in refusals:
            refusals.append(refusal)
    if refusals:
        lost = ", ".join(operation for operation in OPERATIONS if chosen[operation] != wanted)
        reason = f"xla instead of {wanted} for {lost} on {device}: {'; '.join(refusals)}"
    else:
        reason = f"{wanted} on {device}" if name == "auto" else ""
    return ResolvedBackends(**chosen, reason=reason)


def _refusal(backend: str, operation: str, platform: str, head_dim: int, compute_capability: str) -> str:
    """Why `backend` can't run `operation`, or ""."""
    if backend not in ("triton", "triton_interpret"):
        return ""
    if backend == "triton" and platform not in ("gpu", "cuda"):
        return f"the triton kernels need a GPU, the platform is {platform}"
    if backend == "triton" and compute_capability and _capability(compute_capability) < _MIN_TRITON_CAPABILITY:
        return f"the triton kernels need compute capability 8.0, the device has {compute_capability}"
    power_of_two = head_dim & (head_dim - 1) == 0
    if operation != "write_kv" and not (power_of_two and 16 <= head_dim <= 256):
        return f"the triton attention kernels need a head_dim that is a power of two in 16..256, it is {head_dim}"
    return ""


def _capability(text: str) -> int:
    major, _, minor = text.partition(".")
    return 10 * int(major) + int(minor or 0)


def implementation(operation: str, backend: str) -> Callable[..., jax.Array]:
    """The function of a concrete backend. Its module is imported now, not with the folder.

    Raises ValueError for a name that isn't concrete or isn't known.
    """
    if backend not in BACKENDS:
        hint = "; resolve_backend turns 'auto' into names" if backend == "auto" else ""
        raise ValueError(f"{operation}: backend is {backend!r}, has to be one of {', '.join(BACKENDS)}{hint}")
    module = _MODULES[_INTERPRETED.get(backend, backend)][operation]
    function = getattr(importlib.import_module(f".{module}", __package__), operation)
    return functools.partial(function, interpret=True) if backend in _INTERPRETED else function
