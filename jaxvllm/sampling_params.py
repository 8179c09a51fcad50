"""What a caller may ask of one request: `SamplingParams`, with vLLM's names and meanings.

Owns the validation of these values. Must not know about models (an id is only checked against zero here; the
engine checks it against the vocabulary), devices or jax.
"""

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GREEDY_BELOW = 1e-5
"""Temperatures under this count as 0 (greedy), as in vLLM: logits / temperature stays finite in float32."""

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends. Immutable; equal values compare equal.

    temperature: logits are divided by it before sampling; 0 is greedy. Values in (0, 1e-5) become 0.
    max_tokens: output tokens at most, >= 1; None leaves only the engine's max_model_len as the limit.
    ignore_eos: the model's own end tokens don't end the request (stop_token_ids still do).
    stop_token_ids: ids (>= 0) that end the request with finish_reason "stop"; any iterable of integers or
        None, always kept as a tuple. The id that ended a request is its stop_reason.
    seed: 64-bit key of the request's noise: the same seed gives the same tokens in any batch. None (or -1, as
        in vLLM) lets the engine derive one from its own seed and the request's number.

    Raises ValueError that names the field, the value and the limit.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _set(self, "temperature", _temperature(self.temperature))
        if self.max_tokens is not None:
            max_tokens = _integer("max_tokens", self.max_tokens)
            if max_tokens < 1:
                raise ValueError(f"max_tokens={max_tokens} must be at least 1; pass None for no limit")
            _set(self, "max_tokens", max_tokens)
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        _set(self, "ignore_eos", bool(self.ignore_eos))
        _set(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        _set(self, "seed", _seed(self.seed))


def _set(params: SamplingParams, name: str, value: Any) -> None:
    """Store a normalised value; the class is frozen for everyone else."""
    object.__setattr__(params, name, value)


def _integer(name: str, value: Any) -> int:
    # bool is an Integral in Python, but max_tokens=True is a mistake, not a 1.
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def _temperature(value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(f"temperature={value!r} must be a number, not {type(value).__name__}")
    try:
        temperature = float(value)
    except OverflowError:
        temperature = math.inf
    # The device holds it as float32: what overflows there is not finite either.
    if not math.isfinite(temperature) or not 0 <= temperature <= float(np.finfo(np.float32).max):
        raise ValueError(f"temperature={temperature} must be finite and at least 0; 0 is greedy decoding")
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"stop_token_ids={value!r} must be a sequence of token ids, like [151643, 151645]")
    ids = tuple(_integer("stop_token_ids entry", token_id) for token_id in value)
    negative = [token_id for token_id in ids if token_id < 0]
    if negative:
        raise ValueError(f"stop_token_ids={list(ids)} holds negative ids {negative}; ids start at 0")
    return ids


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value)
    if seed == -1:
        return None
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} must be in [0, 2**64 - 1]; pass None for an unseeded request")
    return seed
