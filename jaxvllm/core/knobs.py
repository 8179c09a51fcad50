"""Knobs: the processors' numbers of a request, as one row of int32 words that a step hands to the device.

Owns the order and encoding of these words, once, for both sides: the host fills them when a request gets its row, the
device slices them (`runtime.redraw`). Must not know about vocabularies or jax.

A request that uses no processor has neutral knobs, so that it may share a step with others: nothing is done to it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxvllm.core.plan import StepPlan
    from jaxvllm.core.request import Request

MAX_BAD_WORDS = 128
"""Token sequences that a request may forbid; a text is one or two of them (with and without a space before)."""
MAX_BAD_WORD_TOKENS = 16

KNOBS = (
    ("row_state", "int32"),  # 1: the device's tables hold something about this request
    ("top_k", "int32"),  # 0: all
    ("ends_from", "int32"),  # end tokens are masked for a token with fewer tokens before it than this
    ("top_p", "float32"),
    ("log_min_p", "float32"),  # -inf: off
    ("presence_penalty", "float32"),
    ("frequency_penalty", "float32"),
    ("repetition_penalty", "float32"),
)
"""Name and dtype of each word. A float32 word is the bits of its number."""

DRAW = (
    ("rows", "int32"),
    ("seed_low", "uint32"),
    ("seed_high", "uint32"),
    ("sample_positions", "int32"),
    ("temperatures", "float32"),
    *KNOBS,
)
"""The words of a sequence that draws from processed logits: what a plan says about its draw, then its knobs."""


_NEUTRAL = np.zeros(len(KNOBS), np.int32)
_NEUTRAL[[3, 4, 7]] = np.array([1.0, -math.inf, 1.0], np.float32).view(np.int32)


def neutral_knobs(num_rows: int) -> np.ndarray:
    """int32[num_rows, len(KNOBS)] of requests that use no processor (and of pads)."""
    return np.tile(_NEUTRAL, (num_rows, 1))


def draw_words(plan: StepPlan, knobs: np.ndarray) -> np.ndarray:
    """int32[B, len(DRAW)] of a plan's B sequences, pads included; knobs int32[B, len(KNOBS)]."""
    columns = plan.rows, *plan.seeds.view(np.int32).T, plan.sample_positions, plan.temperatures.view(np.int32)
    return np.concatenate([np.stack(columns, axis=1), knobs], axis=1)


def knobs_of(request: Request) -> np.ndarray:
    """int32[len(KNOBS)] of one request."""
    params = request.params
    words = _NEUTRAL.copy()
    if not params.needs_processors:
        return words
    filters = params.has_filters
    words[0] = params.has_row_state
    words[1] = min(params.top_k, 2**31 - 1) if filters else 0
    words[2] = min(request.num_prompt + params.min_tokens, 2**31 - 1) if params.min_tokens else 0
    numbers = (
        params.top_p if filters else 1.0,
        math.log(params.min_p) if filters and params.min_p else -math.inf,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    words[3:] = np.array(numbers, np.float32).view(np.int32)
    return words
