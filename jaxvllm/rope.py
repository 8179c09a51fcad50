"""RopeConfig: which rotary position embedding a checkpoint asks for, and its frequencies. Part of ``config``.

Owns: reading ``rope_parameters`` and the formulas of each rope type. Must not know: jax, arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A configuration that can't be run; the message names the field, the value, the limit and the way out."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    ``rope_type`` "default": inverse frequencies theta^(-2i/D). "yarn": NTK-by-parts interpolation (Peng et al. 2023,
    arXiv:2309.00071) with ``factor`` over ``original_max_position_embeddings``.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a config.json: ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before it)."""
        raw: dict[str, Any] = dict(config.get("rope_scaling") or {})
        raw |= config.get("rope_parameters") or {}
        theta = raw.pop("rope_theta", config.get("rope_theta", 10000.0))
        rope_type = raw.pop("rope_type", raw.pop("type", "default"))
        raw.pop("type", None)
        if rope_type == "default":
            return cls(theta=float(theta))
        if rope_type != "yarn":
            raise ConfigError(f"rope_type={rope_type!r} isn't supported; supported are 'default' and 'yarn'")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(raw) - known - {"mscale", "mscale_all_dim"})
        if unknown:
            raise ConfigError(f"rope_parameters has fields that would be ignored: {', '.join(unknown)}")
        factor = float(raw["factor"]) if "factor" in raw else 1.0
        mscale, mscale_all = raw.pop("mscale", None), raw.pop("mscale_all_dim", None)
        attention_factor = raw.get("attention_factor")
        if attention_factor is None and mscale and mscale_all:
            attention_factor = _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all))
        return cls(
            theta=float(theta),
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=raw.get("original_max_position_embeddings")
            or config.get("max_position_embeddings"),
            beta_fast=float(raw.get("beta_fast") or 32.0),
            beta_slow=float(raw.get("beta_slow") or 1.0),
            attention_factor=attention_factor,
            truncate=bool(raw.get("truncate", True)),
        )

    def frequencies(self, head_dim: int) -> tuple[list[float], float]:
        """Inverse frequencies (head_dim/2 values) and the factor by which cos and sin are multiplied."""
        half = head_dim // 2
        plain = [self.theta ** (-2.0 * i / head_dim) for i in range(half)]
        if self.rope_type == "default":
            return plain, 1.0
        assert self.original_max_position_embeddings is not None
        length = self.original_max_position_embeddings

        def dimension_of(
            rotations: float,
        ) -> float:  # the dimension that turns this often over the original length
            return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = (high - low) or 0.001
        mixed = []
        for i, frequency in enumerate(plain):
            interpolate = min(max((i - low) / span, 0.0), 1.0)
            mixed.append(frequency / self.factor * interpolate + frequency * (1.0 - interpolate))
        scale = self.attention_factor if self.attention_factor is not None else _yarn_mscale(self.factor, 1.0)
        return mixed, scale


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
