"""What a JAX program asks of an engine besides text: scores, and weights that change. Of the engine's room.

Owns what happens to requests and cached prefixes when weights change. Must not know how they are placed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxvllm import scoring, startup
from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import BucketTable
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.inputs import parse_prompt
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.runtime.executor import Executor


class Trainable:
    """``score``, ``update_weights`` and ``reset_prefix_cache``."""

    config: EngineConfig
    model_config: ModelConfig
    buckets: BucketTable
    _executor: Executor
    _scheduler: Scheduler
    _lock: threading.RLock
    _encode: Any
    _check_open: Any

    def score(self, token_ids: Any) -> np.ndarray:
        """Teacher-forced log-probabilities of one sequence, through the same forward and paged cache.

        token_ids: n >= 2 ids (list or array) or a string. Returns float32 [n - 1]: element i is
        log p(token[i + 1] | token[0..i]) of the raw model distribution (temperature 1). Blocks are borrowed from the
        pool for the call. Raises ValueError when the sequence doesn't fit, with the numbers.
        """
        self._check_open()
        ids = parse_prompt(token_ids, self._encode, self.model_config.vocab_size, "token_ids").token_ids
        with self._lock, deferred_interrupts() as interrupts:
            return scoring.score(self._executor, self._scheduler, self.buckets, self.config, ids, interrupts.deliver)

    def reset_prefix_cache(self) -> None:
        """Forgets what blocks hold (after the weights changed); running requests keep their own blocks."""
        with self._lock, deferred_interrupts():
            self._scheduler.reset_prefix_cache()

    def update_weights(self, params: Mapping[str, Any]) -> None:
        """Replaces the model's weights, between two calls of a training loop; cached prefixes are forgotten.

        params: the tree that the family's forward takes, or {path: array} with the paths and shapes of
        ``models.registry.param_table(config)`` (the same at any tensor_parallel_size); host or device arrays of
        any float dtype. They are copied: the caller's arrays stay the caller's. Nothing is compiled again.

        Raises ValueError that lists every parameter that doesn't fit, RuntimeError while requests are unfinished.
        """
        self._check_open()
        with self._lock, deferred_interrupts():
            startup.update_weights(self._executor, self._scheduler, params)
