"""Qwen2 and Qwen2.5, dense (Qwen2 Technical Report, arXiv:2407.10671): a bias on queries, keys and values (on nothing
else), and no norm on heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxvllm.config import ModelConfig
from jaxvllm.models import dense
from jaxvllm.models.arithmetic import PLAIN, Arithmetic
from jaxvllm.models.dense import Attend, Fused, head_table, rotated
from jaxvllm.models.params import Table

__all__ = ["forward", "head_table", "param_table"]


def param_table(config: ModelConfig, *, tp: int = 1) -> Table:
    """See ``dense.param_table``; qkv_bias beside it."""
    return dense.param_table(config, tp=tp, qkv_bias=True)


def forward[Carry](params: Mapping[str, Any], config: ModelConfig, token_ids: jax.Array, positions: jax.Array,
                   attend: Attend[Carry], carry: Carry, *, axis: str | None = None,
                   fused: Fused[Carry] | None = None, arithmetic: Arithmetic = PLAIN
                   ) -> tuple[jax.Array, Carry]:  # fmt: skip
    """See ``dense.forward``."""

    def qkv(i: jax.Array, layer: Mapping[str, jax.Array], y: jax.Array, cos: jax.Array, sin: jax.Array, carry: Carry
            ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Carry]:  # fmt: skip
        rows = arithmetic.project(y, layer["qkv"]) + params["qkv_bias"][i]
        return rotated(i, rows, cos, sin, carry, fused, arithmetic)

    return dense.forward(params, config, token_ids, positions, attend, carry, qkv, axis=axis, fused=fused,
                         arithmetic=arithmetic)  # fmt: skip
