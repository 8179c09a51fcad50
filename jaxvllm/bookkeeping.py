"""Which requests an engine knows: how they come and go. Of the engine's room.

Owns: the dictionaries from a caller's id, and from the scheduler's ids, to what is tracked. Must not know: steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.distributed import Alone
from jaxvllm.inputs import Prompt, parse_params
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.processing import bad_word_ids, check_possible
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Completion, Tracked, Wish, sample_ids, sample_params


class Bookkeeping:
    """The requests of an engine, from ``_add`` to ``_drop``."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    _scheduler: Scheduler
    _lock: threading.RLock
    _default_params: SamplingParams
    _end_tokens: set[int]
    _tracked: dict[str, Tracked]
    _changed: dict[str, Tracked]  # online requests with news that step() hasn't returned yet
    _completions: dict[str, Completion]  # by the scheduler's request ids
    _group: Alone
    _tell_add: Any
    _check_leads: Any
    _num_requests: int
    _num_watched: int  # tracked requests of which each token has to be looked at
    driver: Any = None  # the AsyncEngine that steps this engine

    def abort_request(self, request_id: str) -> None:
        """Ends a request wherever it stands and frees its blocks; ``step`` returns it once more with "abort".

        An unknown or finished id is a no-op.
        """
        self._check_leads()
        with self._lock, deferred_interrupts():
            tracked = self._tracked.get(request_id)
            if tracked is not None and not tracked.finished:
                self._group.note("abort", request_id)
                self._abort(tracked)
                if tracked.online:
                    self._changed[request_id] = tracked

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: from generation_config.json, unless generation_config="none"."""
        return self._default_params

    def forget_request(self, request_id: str) -> None:
        """Ends a request whose outputs nobody wants any more: ``step`` says nothing of it. Unknown ids: a no-op."""
        self._check_leads()
        with self._lock, deferred_interrupts():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._drop(tracked)

    def _parse_params(self, params: Any, count: int) -> list[SamplingParams]:
        return parse_params(params, count, self._default_params, self.model_config.vocab_size, self.config)

    def _wish(self, params: SamplingParams) -> Wish:
        encode = None if self.tokenizer is None else partial(self.tokenizer.encode, add_special_tokens=False)
        words = tuple(bad_word_ids(params, encode, self.model_config.vocab_size))
        check_possible(params, words, self._end_tokens, has_text=encode is not None)
        return Wish(params, words)

    def _wishes(self, prompts: Sequence[Prompt], params: Any) -> list[Wish]:
        """One for each prompt; ValueError, and nothing has happened, where one of them can't be served."""
        wishes = [self._wish(one) for one in self._parse_params(params, len(prompts))]
        for i, prompt in enumerate(prompts):
            self._scheduler.check_room(len(prompt.token_ids), f"prompts[{i}]")
        return wishes

    def _in_use(self, request_id: str, n: int) -> bool:
        return request_id in self._tracked or any(name in self._completions for name in sample_ids(request_id, n))

    def _add(self, prompt: Prompt, wish: Wish, priority: int, *, request_id: str | None, online: bool) -> Tracked:
        params, number = wish.params, self._num_requests
        if request_id is None:
            new_ids = (f"request-{number}" for number in itertools.count(self._num_requests))
            request_id = next(name for name in new_ids if not self._in_use(name, params.n))
        tracked = Tracked(request_id, prompt, params, self.tokenizer, online)
        try:
            for i, name in enumerate(sample_ids(request_id, params.n)):
                request = Request.create(
                    name, self._num_requests, prompt.token_ids, sample_params(params, i), model_eos=self._end_tokens,
                    engine_seed=self.config.seed, priority=priority, bad_words=wish.bad_words,
                    has_siblings=params.n > 1,
                )  # fmt: skip
                completion = tracked.add(request)
                self._scheduler.add(request)
                self._completions[name] = completion
                self._num_requests += 1
        except BaseException:
            for completion in tracked.completions:
                name = completion.request.request_id
                if self._completions.get(name) is completion:
                    del self._completions[name]
                    self._scheduler.abort(name)
            raise
        self._tracked[request_id] = tracked
        self._num_watched += tracked.is_watched
        self._tell_add(tracked, number, wish, priority)
        return tracked

    def _abort(self, tracked: Tracked) -> None:
        for completion in tracked.completions:
            self._scheduler.abort(completion.request.request_id)

    def _drop(self, tracked: Tracked) -> None:
        """Nobody wants to hear of it any more."""
        if self._tracked.get(tracked.request_id) is tracked:
            self._group.note("drop", tracked.request_id)
        self._abort(tracked)
        if self._tracked.pop(tracked.request_id, None) is not None:
            self._num_watched -= tracked.is_watched
            self._changed.pop(tracked.request_id, None)
            for completion in tracked.completions:
                del self._completions[completion.request.request_id]
