"""Which implementation runs: the table of backends and the choice for a device.

Owns the names ("reference", "xla", "triton", "mosaic", and "..._interpret" of the last two) and what each can do. It
must not know how a kernel works: an implementation is a module of this folder with a function of the operation's
name. A new backend is a new file, a line in the table, one in `_CHAINS` and a rule in `_refusal`.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .shapes import FLOAT_DTYPES, MOSAIC_BLOCK_SIZES, MOSAIC_HEAD_DIMS

OPERATIONS = ("write_kv", "decode_attention", "ragged_attention")
_MODULES = {
    "reference": {**dict.fromkeys(OPERATIONS, "reference"), "invariant_attention": "attention_rows"},
    "xla": {**dict.fromkeys(OPERATIONS, "xla"), "invariant_attention": "attention_rows"},
    "triton": {  # from the fourth on its alone: elsewhere they are composed of plain jax
        "write_kv": "kv_write_triton",
        "decode_attention": "decode_triton",
        "ragged_attention": "prefill_triton",
        "add_rms_norm": "norm_triton",
        "qk_norm_rope_write": "qkv_write_triton",
        "gumbel_argmax": "sample_triton",
        "filter_threshold": "filter_triton",
        "invariant_attention": "prefill_triton",
        "rope_write": "qkv_write_triton",
        "matmul": "matmul_triton",
        **dict.fromkeys(("silu_mul", "rope_tables", "sum_exp", "log_sum"), "rows_triton"),
    },
    "mosaic": {
        "decode_attention": "decode_mosaic",
        "ragged_attention": "prefill_mosaic",
        "invariant_attention": "prefill_mosaic",
        "mixed_attention": "mixed_mosaic",
        **dict.fromkeys(("all_reduce_add_rms_norm", "best_of_shards"), "exchange_mosaic"),
    },
}
_INTERPRETED = {"triton_interpret": "triton", "mosaic_interpret": "mosaic"}  # run anywhere, slowly: for tests
BACKENDS = (*_MODULES, *_INTERPRETED)
_CHAINS = {  # who is asked in turn, operation by operation; the last one never refuses
    "reference": ("reference",),
    "xla": ("xla",),
    "triton": ("triton", "xla"),
    "triton_interpret": ("triton_interpret", "xla"),
    "mosaic": ("mosaic", "triton", "xla"),
    "mosaic_interpret": ("mosaic_interpret", "triton_interpret", "xla"),
}
_AUTO = {  # the chains of "auto": the fastest of what has run whole engines on the H200
    "write_kv": "triton",
    "decode_attention": "triton",
    "ragged_attention": "mosaic",
}
_MIN_TRITON_CAPABILITY = 80  # bfloat16 dots
_MOSAIC_CAPABILITY = 90  # wgmma: Hopper alone


@dataclass(frozen=True, slots=True)
class ResolvedBackends:
    """One concrete backend name per operation, and why ("" when it is simply what was asked for).

    invariant: no row's result may depend on the rows beside it. Then `invariant_attention` serves every step, on
    ragged_attention's backend.
    """

    write_kv: str
    decode_attention: str
    ragged_attention: str
    reason: str
    invariant: bool = False

    @property
    def fused(self) -> str | None:
        """The backend of the fused elementwise kernels, or None: compose them of plain jax."""
        return self.write_kv if self.write_kv.startswith("triton") else None

    @property
    def mixed(self) -> str | None:
        """The backend of `mixed_attention`, or None: `ragged_attention` does it all."""
        return None if self.invariant or not self.ragged_attention.startswith("mosaic") else self.ragged_attention


def resolve_backend(
    name: str,
    *,
    platform: str,
    head_dim: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    device_kind: str = "",
    compute_capability: str = "",
    invariant: bool = False,
) -> ResolvedBackends:
    """The backends that run for a request of `name` ("auto" or a name of BACKENDS) on a device.

    platform is the device's ("cpu", "gpu"/"cuda"), device_kind its `device_kind` (for the reason),
    compute_capability its `compute_capability` ("9.0"; "" is taken to be right). A backend that can't run there
    gives way to the next of its chain, operation by operation, with a reason to log. invariant: see
    ResolvedBackends. Raises ValueError for an
    unknown name or dtype.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention_backend is {name!r}; known are 'auto', {', '.join(map(repr, BACKENDS))}")
    if jnp.dtype(dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; the kernels support {', '.join(FLOAT_DTYPES)}")
    if block_size < 1 or head_dim < 1:
        raise ValueError(f"block_size is {block_size} and head_dim {head_dim}; both have to be at least 1")
    device = device_kind or platform
    chosen, lost, refusals = {}, {}, []
    for operation in OPERATIONS:
        whole = _CHAINS[_AUTO[operation] if name == "auto" else name]
        chain = [backend for backend in whole if operation in _table(backend)]
        for backend in chain:
            chosen[operation] = backend
            refusal = _refusal(backend, operation, platform, head_dim, block_size, dtype, compute_capability)
            if not refusal:
                break
            if refusal not in refusals:
                refusals.append(refusal)
        if chosen[operation] != chain[0]:
            lost.setdefault((chosen[operation], chain[0]), []).append(operation)
    if lost:
        changes = [f"{new} instead of {old} for {', '.join(operations)}" for (new, old), operations in lost.items()]
        reason = f"{', '.join(changes)} on {device}: {'; '.join(refusals)}"
    else:
        names = dict.fromkeys(chosen.values())
        reason = f"{' and '.join(names)} on {device}" if name == "auto" else ""
    if invariant:
        chosen["decode_attention"] = chosen["ragged_attention"]
    return ResolvedBackends(**chosen, reason=reason, invariant=invariant)


def _table(backend: str) -> dict[str, str]:
    """Module by operation."""
    return _MODULES[_INTERPRETED.get(backend, backend)]


def _refusal(
    backend: str,
    operation: str,
    platform: str,
    head_dim: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    compute_capability: str,
) -> str:
    """Why `backend` can't run `operation`, or ""."""
    kernels = _INTERPRETED.get(backend, backend)
    if kernels not in ("triton", "mosaic"):
        return ""
    if backend in ("triton", "mosaic") and platform not in ("gpu", "cuda"):
        return f"the {backend} kernels need a GPU, the platform is {platform}"
    capability = _capability(compute_capability) if compute_capability else None
    if backend == "triton" and capability is not None and capability < _MIN_TRITON_CAPABILITY:
        return f"the triton kernels need compute capability 8.0, the device has {compute_capability}"
    if backend == "mosaic" and capability not in (None, _MOSAIC_CAPABILITY):
        return f"the mosaic kernel is for compute capability 9.0, the device has {compute_capability}"
    if kernels == "mosaic":
        return _mosaic_refusal(operation, head_dim, block_size, jnp.dtype(dtype).name)
    power_of_two = head_dim & (head_dim - 1) == 0
    if operation != "write_kv" and not (power_of_two and 16 <= head_dim <= 256):
        return f"the triton attention kernels need a head_dim that is a power of two in 16..256, it is {head_dim}"
    return ""


def _mosaic_refusal(operation: str, head_dim: int, block_size: int, dtype: str) -> str:
    if dtype != "bfloat16":
        return f"the mosaic kernel is for bfloat16, the dtype is {dtype}"
    head_dims = MOSAIC_HEAD_DIMS[operation]
    if head_dim not in head_dims:
        return f"the mosaic kernel needs a head_dim of {_either(head_dims)}, it is {head_dim}"
    if block_size not in MOSAIC_BLOCK_SIZES:
        return f"the mosaic kernel needs a block size of {_either(MOSAIC_BLOCK_SIZES)}, it is {block_size}"
    return ""


def _either(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


def _capability(text: str) -> int:
    major, _, minor = text.partition(".")
    return 10 * int(major) + int(minor or 0)


def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """The function of a concrete backend. Its module is imported now, not with the folder.

    Raises ValueError for a name that isn't concrete or isn't known.
    """
    if backend not in BACKENDS:
        hint = "; resolve_backend turns 'auto' into names" if backend == "auto" else ""
        raise ValueError(f"{operation}: backend is {backend!r}, has to be one of {', '.join(BACKENDS)}{hint}")
    if operation not in _table(backend):
        raise ValueError(
            f"{operation}: backend {backend!r} has no such kernel; resolve_backend gives each operation one"
        )
    module = _table(backend)[operation]
    function = getattr(importlib.import_module(f".{module}", __package__), operation)
    return functools.partial(function, interpret=True) if backend in _INTERPRETED else function
