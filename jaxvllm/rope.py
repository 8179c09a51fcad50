"""RopeConfig: which rotary position embedding a checkpoint asks for, and its frequencies. Part of ``config``.

Owns: reading ``rope_parameters`` and the formulas of each rope type. Must not know: jax, arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A configuration that can't be run; the message names the field, the value, the limit and the way out."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    ``rope_type`` "default": inverse frequencies theta^(-2i/D). "yarn": NTK-by-parts interpolation (Peng et al. 2023,
    arXiv:2309.00071) with ``factor`` over ``original_max_position_embeddings``. "llama3": Llama 3.1's, which divides
    by ``factor`` the frequencies that turn less than ``low_freq_factor`` times over the original length, keeps those
    that turn more than ``high_freq_factor`` times, and goes over linearly between them.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a number above 0"
            for name in ("theta", "factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
            if not _is_positive(getattr(self, name))
        ]
        if self.attention_factor is not None and not _is_positive(self.attention_factor):
            problems.append(f"attention_factor={self.attention_factor!r} must be a number above 0")
        length = self.original_max_position_embeddings
        if self.rope_type != "default" and (not _is_positive(length) or not isinstance(length, int)):
            problems.append(f"original_max_position_embeddings={length!r} must be a whole number of at least 1")
        if not problems and self.theta <= 1:
            problems.append(f"rope_theta={self.theta} must be above 1")
        if not problems and self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            problems.append(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )
        if problems:
            raise ConfigError("rope_parameters: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a config.json: ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before it)."""
        raw: dict[str, Any] = dict(config.get("rope_scaling") or {})
        raw |= config.get("rope_parameters") or {}
        theta = raw.pop("rope_theta", config.get("rope_theta", 10000.0))
        rope_type = raw.pop("rope_type", raw.pop("type", "default"))
        raw.pop("type", None)
        partial = raw.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor={partial!r} isn't supported; heads are rotated whole")
        if rope_type == "default":
            return cls(theta=float(theta))
        length = raw.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        if rope_type == "llama3":
            _refuse_unknown(raw, {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
            missing = [name for name in ("factor", "low_freq_factor", "high_freq_factor") if raw.get(name) is None]
            if missing:
                raise ConfigError(f"rope_parameters of rope_type='llama3' needs {', '.join(missing)}")
            return cls(theta=float(theta), rope_type="llama3", factor=float(raw["factor"]),
                       original_max_position_embeddings=length, low_freq_factor=float(raw["low_freq_factor"]),
                       high_freq_factor=float(raw["high_freq_factor"]))  # fmt: skip
        if rope_type != "yarn":
            raise ConfigError(f"rope_type={rope_type!r} isn't supported; supported are 'default', 'yarn' and 'llama3'")
        _refuse_unknown(raw, {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                              "attention_factor", "truncate", "mscale", "mscale_all_dim"})  # fmt: skip
        factor = float(raw["factor"]) if "factor" in raw else 1.0
        mscale, mscale_all = raw.pop("mscale", None), raw.pop("mscale_all_dim", None)
        attention_factor = raw.get("attention_factor")
        if attention_factor is None and mscale and mscale_all:
            attention_factor = _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all))
        return cls(
            theta=float(theta),
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=length,
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
        if self.rope_type == "llama3":
            return [self._llama3(frequency, length) for frequency in plain], 1.0

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

    def _llama3(self, frequency: float, length: int) -> float:
        turns = frequency * length / (2 * math.pi)  # over the original length
        keep = min(max((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0), 1.0)
        return frequency * keep + frequency / self.factor * (1.0 - keep)


def _refuse_unknown(raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError(f"rope_parameters has fields that would be ignored: {', '.join(unknown)}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
