"""Which family a model belongs to, by the architecture that its config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jaxvllm.config import ModelConfig
from jaxvllm.models import llama, qwen2, qwen3
from jaxvllm.models.arithmetic import PLAIN, Arithmetic
from jaxvllm.models.dense import Attend, Fused
from jaxvllm.models.params import Table


class Family(Protocol):
    """What a family's module offers; ``dense`` documents each."""

    def param_table(self, config: ModelConfig, *, tp: int = 1) -> Table: ...

    def forward[Carry](self, params: Mapping[str, Any], config: ModelConfig, token_ids: jax.Array,
                       positions: jax.Array, attend: Attend[Carry], carry: Carry, *, axis: str | None = None,
                       fused: Fused[Carry] | None = None, arithmetic: Arithmetic = PLAIN
                       ) -> tuple[jax.Array, Carry]: ...  # fmt: skip

    def head_table(self, params: Mapping[str, Any]) -> jax.Array: ...


FAMILIES: dict[str, Family] = {  # the keys are config.SUPPORTED_ARCHITECTURES: a test compares them
    "Qwen3ForCausalLM": qwen3,
    "Qwen2ForCausalLM": qwen2,
    "LlamaForCausalLM": llama,
}


def family(config: ModelConfig) -> Family:
    """The module of ``config``'s family; ModelConfig has refused every other architecture."""
    return FAMILIES[config.architecture]


def param_table(config: ModelConfig, *, tp: int = 1) -> Table:
    """The family's table; tp = 1 is the form that checkpoints store."""
    return family(config).param_table(config, tp=tp)
