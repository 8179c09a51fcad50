"""Qwen3, dense (Qwen3 Technical Report, arXiv:2505.09388): an RMS norm on each query and key head before the rotary
embedding (qk-norm), and no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxvllm.config import ModelConfig
from jaxvllm.models import dense
from jaxvllm.models.arithmetic import PLAIN, Arithmetic
from jaxvllm.models.dense import Attend, Fused, head_table, split_qkv
from jaxvllm.models.params import Table

__all__ = ["Attend", "Fused", "forward", "head_table", "param_table", "split_qkv"]


def param_table(config: ModelConfig, *, tp: int = 1) -> Table:
    """See ``dense.param_table``; q_norm and k_norm beside it."""
    return dense.param_table(config, tp=tp, qk_norm=True)


def forward[Carry](params: Mapping[str, Any], config: ModelConfig, token_ids: jax.Array, positions: jax.Array,
                   attend: Attend[Carry], carry: Carry, *, axis: str | None = None,
                   fused: Fused[Carry] | None = None, arithmetic: Arithmetic = PLAIN
                   ) -> tuple[jax.Array, Carry]:  # fmt: skip
    """See ``dense.forward``."""
    eps = config.rms_norm_eps

    def qkv(i: jax.Array, layer: Mapping[str, jax.Array], y: jax.Array, cos: jax.Array, sin: jax.Array, carry: Carry
            ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Carry]:  # fmt: skip
        rows = arithmetic.project(y, layer["qkv"])  # [T, Hkv, G + 2, D]
        if fused is not None:
            q, carry = fused.norm_rope_write(i, rows, params["q_norm"], params["k_norm"], cos, sin, carry)
            return q, None, None, carry
        q, k, v = split_qkv(rows)
        norm, rotate = arithmetic.rms_norm, arithmetic.apply_rope
        q = rotate(norm(q, params["q_norm"][i], eps), cos, sin)
        return q, rotate(norm(k, params["k_norm"][i], eps), cos, sin), v, carry

    return dense.forward(params, config, token_ids, positions, attend, carry, qkv, axis=axis, fused=fused,
                         arithmetic=arithmetic)  # fmt: skip
