"""Checkpoints: Hugging Face folders and our own format, read tensor by tensor; no torch, no GPU.

    load_params(path, table, dtype=..., put=...)   both formats, whole parameters
    load_shards(path, table, dtype=..., place=...) both formats, the parts that each device needs
    convert_checkpoint(src, dst)                   Hugging Face -> our format
    export_hf(src, dst)                            the way back, bit for bit
    detect(path)                                   "hf" or "jaxvllm"
    verify_table(path, table)                      raises one CheckpointError that lists every problem
    verify_checkpoint(path)                        reads every byte again and compares checksums

Owns: the files and what can be wrong with them. Must not know: meshes, shardings, engines. Names are loaded
on first use, so that importing this package imports neither jax nor orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvllm.convert.build import convert_checkpoint
    from jaxvllm.convert.errors import CheckpointError
    from jaxvllm.convert.export import export_hf
    from jaxvllm.convert.load import detect, load_params, load_shards, open_checkpoint, verify_table
    from jaxvllm.convert.verify import verify_checkpoint

_EXPORTS = {
    "CheckpointError": "jaxvllm.convert.errors",
    "convert_checkpoint": "jaxvllm.convert.build",
    "detect": "jaxvllm.convert.load",
    "export_hf": "jaxvllm.convert.export",
    "load_params": "jaxvllm.convert.load",
    "load_shards": "jaxvllm.convert.load",
    "open_checkpoint": "jaxvllm.convert.load",
    "verify_checkpoint": "jaxvllm.convert.verify",
    "verify_table": "jaxvllm.convert.load",
}

__all__ = [
    "CheckpointError",
    "convert_checkpoint",
    "detect",
    "export_hf",
    "load_params",
    "load_shards",
    "open_checkpoint",
    "verify_checkpoint",
    "verify_table",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxvllm.convert' has no attribute {name!r}; it exports {', '.join(__all__)}")
