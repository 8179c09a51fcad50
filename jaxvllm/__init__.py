"""jaxvllm: continuous batching, paged KV cache and prefix caching in JAX and Pallas for NVIDIA GPUs.

Exports are lazy (PEP 562): ``import jaxvllm`` and ``import jaxvllm.core`` never import jax, so that a host program,
a scheduler test or ``jaxvllm --help`` starts in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvllm.config import EngineConfig, ModelConfig
    from jaxvllm.engine import LLM, Engine
    from jaxvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from jaxvllm.recording import record
    from jaxvllm.sampling_params import SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "jaxvllm.engine",
    "LLM": "jaxvllm.engine",
    "ModelConfig": "jaxvllm.config",
    "EngineConfig": "jaxvllm.config",
    "SamplingParams": "jaxvllm.sampling_params",
    "RequestOutput": "jaxvllm.outputs",
    "CompletionOutput": "jaxvllm.outputs",
    "RequestMetrics": "jaxvllm.outputs",
    "record": "jaxvllm.recording",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "record",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxvllm' has no attribute {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
