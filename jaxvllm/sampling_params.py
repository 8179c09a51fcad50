"""What a caller may ask of one request: `SamplingParams`, with vLLM's names, defaults and meanings.

Owns the validation of these values. Must not know about models (ids are only checked against zero here; the
engine checks them against the vocabulary), devices or jax.
"""

import enum
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GREEDY_BELOW = 1e-5
"""Temperatures under this count as 0 (greedy), as in vLLM: logits / temperature stays finite in float32."""

MAX_SEED = 2**64 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)


class RequestOutputKind(enum.Enum):
    """What the outputs of a running request hold: everything so far, only what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends. Immutable; equal values compare equal.

    Applied in this order, each to what the one before left; the top token always stays:

    allowed_token_ids: only these may be sampled. None: all.
    bad_words: texts (or sequences of token ids) that must not come up in the output; a text is forbidden with and
        without a space before it. The last token of a word is masked where the tokens before it stand already.
    min_tokens: end tokens and stop_token_ids are masked, and stop strings ignored, before this many output tokens.
    logit_bias: {id: number that is added to its logit}.
    repetition_penalty: > 0; the logit of a token in the prompt or output is divided by it if positive, else
        multiplied. frequency_penalty, presence_penalty: in [-2, 2]; subtracted from the logit of a token once for each
        time that it is in the output, and once if it is.
    temperature: logits are divided by it before sampling; 0 is greedy. Values in (0, 1e-5) become 0, and greedy
        requests ignore min_p, top_k and top_p.
    min_p: in [0, 1]; tokens less probable than this times the most probable one are left out.
    top_k: the k most probable tokens stay, and those as probable as the k-th; 0 or -1: all.
    top_p: in (0, 1]; a token stays if those more probable than it have less than this probability together (of what
        min_p and top_k left). So the boundary token stays, and equals stay or go together.

    n: completions; they share the prompt's full blocks. Completion i of a seeded request has the seed ``seed + i``.
    seed: 64-bit key of the request's noise: the same seed gives the same tokens in any batch. None (or -1, as
        in vLLM) lets the engine derive one from its own seed and the request's number.
    max_tokens: output tokens at most, >= 1; None leaves only the engine's max_model_len as the limit.
    ignore_eos: the model's own end tokens don't end the request (stop_token_ids still do).
    stop_token_ids: ids (>= 0) that end the request with finish_reason "stop"; the id is its stop_reason.
    stop: a text or texts that end the request; the one that came up first is its stop_reason. Checked on the text, so
        tokens' borders don't matter. include_stop_str_in_output: the text keeps the stop string or stop token.
    logprobs: log-probabilities of each sampled token and of this many most probable ones; 0: of the sampled one
        only; None: none. prompt_logprobs: the same of the prompt's tokens.
    detokenize: False leaves the text empty. skip_special_tokens: the text leaves them out.
    output_kind: what outputs hold before the end (of ``Engine.step``, ``Engine.stream`` and ``AsyncEngine``).

    Raises ValueError that names the field, the value and the limit.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = ()

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "n": _integer("n", self.n, 1),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0, _MAX_FLOAT, above=True),
            "temperature": _temperature(self.temperature),
            "top_p": _number("top_p", self.top_p, 0, 1, above=True),
            "top_k": max(0, _integer("top_k", self.top_k, -1, "; 0 or -1 keeps all tokens")),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "seed": _seed(self.seed),
            "stop": _stop(self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "logit_bias": _logit_bias(self.logit_bias),
            "bad_words": _bad_words(self.bad_words),
        }
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"{name}={value!r} must be True or False")
            values[name] = bool(value)
        for name, least, hint in (
            ("max_tokens", 1, "; pass None for no limit"),
            ("logprobs", 0, "; pass None for none"),
            ("prompt_logprobs", 0, "; pass None for none"),
        ):
            value = getattr(self, name)
            values[name] = None if value is None else _integer(name, value, least, hint)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind: CUMULATIVE, DELTA, ...")
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _ids("allowed_token_ids", self.allowed_token_ids)
            if not values["allowed_token_ids"]:
                raise ValueError("allowed_token_ids=[] allows no token; pass None to allow all")
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the class is frozen for everyone else
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}: lower it, or raise "
                "max_tokens"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} must be 1 at temperature=0: greedy completions would be equal")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={list(self.stop)} needs text: leave detokenize=True, or use stop_token_ids")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that came up already count."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p may leave out a token."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_row_state(self) -> bool:
        """Whether the device keeps something about this request by vocabulary id or word."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
        )

    @property
    def needs_processors(self) -> bool:
        """Whether a step that samples for this request must draw from processed logits."""
        return self.has_row_state or self.has_filters or self.logprobs is not None


def _plain_number(name: str, value: Any, kind: Any, what: str) -> Any:
    """value; what is in it, if it is an array of no dimensions (numpy's, jax's)."""
    if hasattr(value, "__array__") and getattr(value, "ndim", None) == 0:
        with suppress(Exception):  # a traced array, a key: refused below as what it is
            value = np.asarray(value).item()
    # bool is an Integral in Python, but max_tokens=True is a mistake, not a 1.
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be {what}, not {type(value).__name__}")
    return value


def _integer(name: str, value: Any, least: int | None = None, hint: str = "") -> int:
    value = _plain_number(name, value, numbers.Integral, "an integer")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} must be at least {least}{hint}")
    return int(value)


def _float(name: str, value: Any) -> float:
    value = _plain_number(name, value, numbers.Real, "a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    number = _float(name, value)
    if not low <= number <= high or (above and number == low):
        limit = f"finite and above {low:g}" if high == _MAX_FLOAT else f"in {'(' if above else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name}={number} must be {limit}")
    return number


def _temperature(value: Any) -> float:
    temperature = _float("temperature", value)
    # The device holds it as float32: what overflows there is not finite either.
    if not math.isfinite(temperature) or not 0 <= temperature <= _MAX_FLOAT:
        raise ValueError(f"temperature={temperature} must be finite and at least 0; 0 is greedy decoding")
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r} must be a sequence of token ids, like [151643, 151645]")
    ids = tuple(_integer(f"{name} entry", token_id) for token_id in value)
    negative = [token_id for token_id in ids if token_id < 0]
    if negative:
        raise ValueError(f"{name}={list(ids)} holds negative ids {negative}; ids start at 0")
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


def _stop(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, Iterable) or isinstance(texts, bytes):
        raise ValueError(f"stop={value!r} must be a text or a list of texts")
    texts = tuple(texts)
    if any(not isinstance(text, str) or not text for text in texts):
        raise ValueError(f"stop={list(texts)} must hold texts of at least one character")
    return texts


def _logit_bias(value: Any) -> dict[int, float] | None:
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias={value!r} must be a dict from token id to number, like {{42: -100}}")
    bias = {}
    for token_id, number in value.items():
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
            token_id = int(token_id)  # the keys of a JSON object
        bias[_integer("logit_bias key", token_id, 0)] = _number("logit_bias value", number, -_MAX_FLOAT, _MAX_FLOAT)
    return bias


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"bad_words={value!r} must be a list of texts")
    words = tuple(word if isinstance(word, str) else _ids("bad_words entry", word) for word in value)
    if not all(words):
        raise ValueError(f"bad_words={list(words)} must not hold empty ones")
    return words
