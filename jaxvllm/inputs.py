"""What callers hand to the engine, checked and made uniform: prompts to id arrays, one SamplingParams each.

Owns: every way to write a prompt and the errors for those that aren't one. Must not know: queues, devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxvllm.config import EngineConfig
from jaxvllm.sampling_params import SamplingParams


@dataclass(slots=True)
class Prompt:
    """One prompt: its text (None when ids were given) and its ids, int32 [num_prompt]."""

    text: str | None
    token_ids: np.ndarray


_NOT_PROMPTS = (bytes, bytearray, memoryview, dict, set, frozenset)  # iterable, but not a sequence of ids


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a string, one list or 1-d array of ids) and not a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, list | tuple):
        return bool(prompts) and all(isinstance(one, int | np.integer) for one in prompts)
    return getattr(prompts, "ndim", None) == 1


def parse_prompts(prompts: Any, encode: Callable[[str], Sequence[int]] | None, vocab_size: int) -> list[Prompt]:
    """A string, strings, an id list, id lists, numpy or jax arrays of ids (1-d: one prompt, 2-d: one a row).

    Raises ValueError that names the prompt's index, the fault and the limit.
    """
    if is_single(prompts):
        return [parse_prompt(prompts, encode, vocab_size, "prompt")]
    if isinstance(prompts, _NOT_PROMPTS) or not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list of either"
        )
    return [parse_prompt(one, encode, vocab_size, f"prompts[{i}]") for i, one in enumerate(prompts)]


def parse_prompt(prompt: Any, encode: Callable[[str], Sequence[int]] | None, vocab_size: int, name: str) -> Prompt:
    """One prompt; ``name`` is what errors call it."""
    if isinstance(prompt, str):
        if encode is None:
            raise ValueError(f"{name} is text, but the model's directory holds no tokenizer: give token ids")
        ids = np.asarray(encode(prompt), dtype=np.int64)
        if ids.size == 0:
            raise ValueError(f"{name} is empty after tokenization; a prompt needs at least one token")
        return Prompt(prompt, _check_ids(ids, vocab_size, name))
    if isinstance(prompt, _NOT_PROMPTS) or not (isinstance(prompt, Iterable) or hasattr(prompt, "__array__")):
        raise ValueError(f"{name} is a {type(prompt).__name__}; give a string or a list of token ids")
    try:
        values = prompt if hasattr(prompt, "__array__") else list(prompt)
        ids = np.asarray(values)
    except Exception as error:  # whatever the caller's object raises: a deleted jax array, a broken iterator
        raise ValueError(f"{name} isn't a flat list of token ids: {error}") from error
    if ids.size == 0:
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    if ids.dtype.kind == "U":
        raise ValueError(f"{name} is a list of strings; give one string, or a flat list of token ids")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a flat list of whole numbers, one sequence, not values of type {ids.dtype} in shape "
            f"{ids.shape}"
        )
    if isinstance(values, list) and bool in (types := list(map(type, values))):  # numpy has made them 0 and 1
        raise ValueError(f"{name}[{types.index(bool)}] is a bool, no token id")
    return Prompt(None, _check_ids(ids, vocab_size, name))


def _check_ids(ids: np.ndarray, vocab_size: int, name: str) -> np.ndarray:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        where = int(np.argmax(ids == bad))
        raise ValueError(f"{name}[{where}]={bad} is no token id: ids go from 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def parse_params(params: Any, count: int, default: SamplingParams, vocab_size: int, engine: EngineConfig
                 ) -> list[SamplingParams]:  # fmt: skip
    """One SamplingParams for all prompts, one each, or None for ``default``; each can be served."""
    params = default if params is None else params
    if isinstance(params, SamplingParams):
        _check_params(params, vocab_size, engine, "sampling_params")
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ValueError(f"sampling_params is a {type(params).__name__}; give a SamplingParams or a list of them")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params[{i}] is a {type(one).__name__}, not a SamplingParams")
        _check_params(one, vocab_size, engine, f"sampling_params[{i}]")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts: give one, or one for each")
    return list(params)


def _check_params(params: SamplingParams, vocab_size: int, engine: EngineConfig, name: str) -> None:
    """What a SamplingParams can't check by itself: the model's ids and the engine's limits."""
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        bad = [token for token in getattr(params, field) or () if token >= vocab_size]
        if bad:
            raise ValueError(f"{name}: {field} {bad} are no token ids: ids go from 0 to {vocab_size - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, field)
        if wanted is not None and wanted > engine.max_logprobs:
            raise ValueError(
                f"{name}: {field}={wanted} is above the engine's max_logprobs={engine.max_logprobs}: ask for fewer, or "
                "make the Engine with a larger max_logprobs"
            )
    if params.needs_processors and not engine.enable_processors:
        raise ValueError(
            f"{name} asks for more than temperature and stops, but the engine was made with enable_processors=False: "
            "leave that out (where none were given, generation_config='none' in the Engine does)"
        )


def parse_priorities(priority: Any, count: int, policy: str) -> list[int]:
    """One whole number for all prompts, one each, or None for 0; another only where the engine's policy has them."""
    values = [0 if priority is None else priority] * count if not isinstance(priority, Sequence) else list(priority)
    if len(values) != count or isinstance(priority, str):
        raise ValueError(f"priority has {len(values)} entries for {count} prompts: give one, or one for each")
    for i, one in enumerate(values):
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise ValueError(f"priority[{i}]={one!r} must be a whole number; smaller is more urgent")
        if one and policy != "priority":
            raise ValueError(
                f"priority[{i}]={one} means nothing under policy={policy!r}: make the Engine with "
                "scheduling_policy='running_first', policy='priority'"
            )
    return [int(one) for one in values]
