"""The host's part in steps with processors: who needs them, and what the device must know about each row.

Part of the engine's room. Owns: which rows' tables the device has. Must not know: what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, draw_words, neutral_knobs
from jaxvllm.core.request import Request
from jaxvllm.core.rows import Rows
from jaxvllm.core.step import ScheduledStep
from jaxvllm.runtime.executor import Executor
from jaxvllm.runtime.processors import ProcessorState, host_row
from jaxvllm.sampling_params import SamplingParams


class Processing:
    """Knows which steps draw from processed logits, and keeps the device's rows up to date.

    A row is sent once, with the first processed step that samples for its request: by then the host knows all its
    tokens, and from then on the device counts by itself (each step that samples for it is a processed one).
    """

    def __init__(self, executor: Executor, num_rows: int) -> None:
        self._executor = executor
        self._sent_epoch = np.full(num_rows, -1, np.int64)  # Rows.epoch of the request that the device's row is about

    def words(self, step: ScheduledStep, rows: Rows, bucket: Bucket, buffer: np.ndarray) -> np.ndarray | None:
        """``draw_words`` of a processed step, or None: no request in it uses processors or log-probabilities.

        Call it after ``schedule``, right before the dispatch.
        """
        if not (rows.processed[step.rows] & step.samples).any():
            return None
        knobs = neutral_knobs(bucket.num_seqs)
        knobs[: len(step.rows)] = rows.knobs[step.rows]
        has_state = (rows.knobs[step.rows, 0] != 0) & step.samples
        stale = has_state & (self._sent_epoch[step.rows] != rows.epoch[step.rows])
        for row in step.rows[stale].tolist():
            self._executor.set_processor_row(row, self._host_row(rows.request.item(row)))
            self._sent_epoch[row] = rows.epoch[row]
        return draw_words(self._executor.layout(bucket).views(buffer), knobs)

    def _host_row(self, request: Request) -> ProcessorState:
        params, known = request.params, request.known_tokens()
        allowed = params.allowed_token_ids
        return host_row(
            known[: request.num_prompt],
            known[request.num_prompt :],
            vocab_size=self._executor.model.vocab_size,
            padded=self._executor.compiler.processor_shapes.counts.shape[1],
            end_ids=np.array(sorted(request.min_tokens_masks), np.int64),
            logit_bias=dict(params.logit_bias or {}),
            allowed=None if allowed is None else np.array(allowed, np.int64),
            words=list(request.bad_words),
        )


def bad_word_ids(params: SamplingParams, encode: Callable[[str], Sequence[int]] | None, vocab_size: int
                 ) -> list[tuple[int, ...]]:  # fmt: skip
    """params.bad_words as token sequences; a text counts as it stands and behind a space, where that differs.

    encode adds no special tokens. (vLLM leaves the second out where it is another number of tokens: the word still
    comes then.) ValueError for what can't be had.
    """
    found: list[tuple[int, ...]] = []
    for word in params.bad_words or ():
        if not isinstance(word, str):
            found.append(tuple(word))
            continue
        if encode is None:
            raise ValueError(f"bad_words: {word!r} is text, but there is no tokenizer: give sequences of token ids")
        plain, spaced = tuple(encode(word.lstrip())), tuple(encode(" " + word.lstrip()))
        found.append(plain)
        if spaced != plain:
            found.append(spaced)
    for ids in found:
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS or max(ids) >= vocab_size:
            raise ValueError(
                f"bad_words: one of them has the tokens {list(ids)}; each must have 1 to {MAX_BAD_WORD_TOKENS} tokens "
                f"below {vocab_size}: shorten it"
            )
    if len(found) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words are {len(found)} token sequences; at most {MAX_BAD_WORDS} can be served: cut some")
    return found


def check_possible(
    params: SamplingParams, bad_words: Sequence[tuple[int, ...]], model_ends: Collection[int], *, has_text: bool
) -> None:
    """ValueError for parameters that together can't be heeded: text without a tokenizer, or no token that may come."""
    if params.stop and not has_text:
        raise ValueError(
            f"stop={list(params.stop)} is text, but there is no tokenizer: give the Engine one, or stop_token_ids"
        )
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
    if not left:
        raise ValueError(
            f"allowed_token_ids={list(params.allowed_token_ids)} are all bad_words: no token may come; allow others"
        )
    if params.min_tokens and not left - set(model_ends) - set(params.stop_token_ids or ()):
        raise ValueError(
            f"allowed_token_ids={sorted(left)} are all end tokens, but min_tokens={params.min_tokens} keeps those from "
            "coming: allow others, or leave min_tokens out"
        )
