"""Which table a checkpoint is checked against, and names of dtypes as numpy knows them."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxvllm.config import ModelConfig
from jaxvllm.models import qwen3
from jaxvllm.models.params import Table

FAMILIES: dict[str, Callable[[ModelConfig], Table]] = {"Qwen3ForCausalLM": qwen3.param_table}

# Stored dtypes that we read, by their safetensors name. float16 is kept as it is and cast when it is loaded.
FLOAT_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def canonical_table(config: ModelConfig) -> Table:
    """The table of a model's parameters as checkpoints store them (tp = 1)."""
    return FAMILIES[config.architecture](config)


def host_dtype(dtype: DTypeLike) -> np.dtype:
    """A numpy dtype from a name ("bfloat16" too) or from anything numpy takes, such as jax's types."""
    return np.dtype(ml_dtypes.bfloat16) if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
