"""An engine that does what another process's engine does: ``follow``. Of the engine's room.

Owns: which operations there are, and requests as plain values. Must not know how they travel (`distributed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from jaxvllm import scoring
from jaxvllm.config import EngineConfig
from jaxvllm.core.buckets import BucketTable
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.distributed import Alone, Follower, describe
from jaxvllm.inputs import Prompt
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.runtime.executor import Executor
from jaxvllm.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.tracked import Tracked, Wish


class Followable:
    """``follow``, and what it needs of an engine."""

    config: EngineConfig
    buckets: BucketTable
    _group: Alone
    _closed: str
    _executor: Executor
    _scheduler: Scheduler
    _lock: threading.RLock
    _tracked: dict[str, Tracked]
    _num_requests: int
    _add: Any
    _abort: Any
    _drop: Any
    _advance: Any

    def follow(self) -> None:
        """Takes part in what the leading process (the lowest one of the mesh) asks of its engine, until it closes that.

        For every other process of an engine over several: this is the only call there. RuntimeError where the leader
        stopped at an error, or is gone; the engine is of no more use then.
        """
        self._check_open(leads=False)
        group = self._group
        if not isinstance(group, Follower):
            raise RuntimeError("follow() is for the other processes of an engine over several; this one leads")
        with self._lock, deferred_interrupts() as interrupts:
            try:
                for name, *arguments in group.operations(interrupts.deliver):
                    getattr(self, f"_follow_{name}")(*arguments)
                    interrupts.deliver()
                self._closed = self._closed or "the leading process closed the engine"
            except BaseException as error:
                self._stop(error)
                raise

    def _follow_add(self, request_id: str, number: int, ids: list[int], params: dict[str, Any],
                    bad_words: list[list[int]], priority: int) -> None:  # fmt: skip
        self._num_requests = number
        wish = Wish(params_of(params), tuple(tuple(word) for word in bad_words))
        # not online: nobody here wants to hear of it
        self._add(Prompt(None, np.array(ids, np.int32)), wish, priority, request_id=request_id, online=False)

    def _follow_abort(self, request_id: str) -> None:
        self._abort(self._tracked[request_id])

    def _follow_drop(self, request_id: str) -> None:
        self._drop(self._tracked[request_id])

    def _follow_step(self) -> None:
        self._advance()

    def _follow_reset(self) -> None:
        self._scheduler.reset_prefix_cache()

    def _follow_score(self, ids: list[int]) -> None:
        self._score(np.array(ids, np.int32))

    def _score(self, ids: np.ndarray, between_chunks: Callable[[], None] = lambda: None) -> np.ndarray:
        return scoring.score(self._executor, self._scheduler, self.buckets, self.config, ids, between_chunks,
                             self._group.wait)  # fmt: skip

    def _stop(self, error: BaseException) -> None:
        """The engine, and those of the other processes, are of no more use."""
        self._closed = f"the engine stopped at an earlier error: {describe(error)}"
        self._group.fail(error)

    def _wait_for_prompt(self, tracked: Tracked) -> None:
        """Until its prompt_logprobs are there: who reads them would wait for ever for a process that failed."""
        for part in tracked.prompt_parts or ():
            for array in part:
                self._group.wait(array)

    def _tell_add(self, tracked: Tracked, number: int, wish: Wish, priority: int) -> None:
        if not self._group.is_alone:
            self._group.note("add", tracked.request_id, number, tracked.prompt.token_ids.tolist(),
                             plain_params(wish.params), wish.bad_words, priority)  # fmt: skip

    def _check_open(self, *, leads: bool = True) -> None:
        """RuntimeError once the engine is closed; where calls are the leader's (``leads``), also on a follower."""
        if self._closed:
            raise RuntimeError(self._closed)
        if leads:
            self._check_leads()

    def _check_leads(self) -> None:
        if self._group.follows:
            raise RuntimeError(f"{self._group.who}: call follow() here, and everything else there")

    def _check_alone(self, what: str) -> None:
        """RuntimeError for what an engine over several processes can't do yet."""
        self._check_open()
        if not self._group.is_alone:
            raise RuntimeError(
                f"{what} isn't available for an engine over several processes yet: make a new Engine, or one in each "
                'process, with mesh=Mesh(jax.local_devices(), ("tp",))'
            )


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """What differs from SamplingParams() as values for JSON."""
    changed = {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}
    if "output_kind" in changed:
        changed["output_kind"] = params.output_kind.name
    return changed


def params_of(plain: dict[str, Any]) -> SamplingParams:
    """``plain_params``' argument again, also after JSON."""
    kind: Any = {"output_kind": RequestOutputKind[plain["output_kind"]]} if "output_kind" in plain else {}
    return SamplingParams(**(plain | kind))
