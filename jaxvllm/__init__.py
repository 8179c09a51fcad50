"""jaxvllm: continuous batching, paged KV cache and prefix caching in JAX and Pallas for NVIDIA GPUs.

Exports are lazy (PEP 562): ``import jaxvllm`` and ``import jaxvllm.core`` never import jax, so that a host program,
a scheduler test or ``jaxvllm --help`` starts in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvllm.async_engine import AsyncEngine
    from jaxvllm.config import ConfigError, EngineConfig, ModelConfig
    from jaxvllm.engine import LLM, Engine
    from jaxvllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from jaxvllm.recording import record
    from jaxvllm.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "jaxvllm.engine",
    "LLM": "jaxvllm.engine",
    "AsyncEngine": "jaxvllm.async_engine",
    "ConfigError": "jaxvllm.config",
    "ModelConfig": "jaxvllm.config",
    "EngineConfig": "jaxvllm.config",
    "SamplingParams": "jaxvllm.sampling_params",
    "RequestOutputKind": "jaxvllm.sampling_params",
    "Logprob": "jaxvllm.outputs",
    "RequestOutput": "jaxvllm.outputs",
    "CompletionOutput": "jaxvllm.outputs",
    "RequestMetrics": "jaxvllm.outputs",
    "record": "jaxvllm.recording",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "Logprob",
    "ModelConfig",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
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
