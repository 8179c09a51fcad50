"""What a JAX program asks of an engine besides text: scores, and weights that change. Of the engine's room.

Owns what happens to requests and cached prefixes when weights change. Must not know how they are placed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh

from jaxvllm import scoring, startup
from jaxvllm.config import ConfigError, EngineConfig, ModelConfig
from jaxvllm.core.buckets import BucketTable
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.distributed import Alone
from jaxvllm.inputs import parse_prompt
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.models import params as tables
from jaxvllm.runtime.executor import Executor
from jaxvllm.runtime.mesh import TP, check_devices
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Completion


class Trainable:
    """``from_params``, ``score``, ``update_params`` and ``reset_prefix_cache``."""

    config: EngineConfig
    model_config: ModelConfig
    buckets: BucketTable
    _executor: Executor
    _scheduler: Scheduler
    _lock: threading.RLock
    _encode: Any
    _group: Alone
    _check_open: Any
    _check_alone: Any
    _advance: Any
    _score: Any
    _stop: Any
    _commit: Any
    _recorder: Any
    _in_flight: deque[Any]
    _completions: dict[str, Completion]
    _default_params: SamplingParams
    generate: Any

    def score(self, token_ids: Any) -> np.ndarray:
        """Teacher-forced log-probabilities of one sequence, through the same forward and paged cache.

        token_ids: n >= 2 ids (list or array) or a string. Returns float32 [n - 1]: element i is
        log p(token[i + 1] | token[0..i]) of the raw model distribution (temperature 1). Blocks are borrowed from the
        pool for the call. Raises ValueError when the sequence doesn't fit, with the numbers.
        """
        self._check_open()
        ids = parse_prompt(token_ids, self._encode, self.model_config.vocab_size, "token_ids").token_ids
        with self._lock, deferred_interrupts() as interrupts:
            if self._group.is_alone:
                return self._score(ids, interrupts.deliver)
            scoring.check(self._scheduler, self.config, ids)
            try:
                self._group.tell("score", ids.tolist())
                return self._score(ids)  # without interrupts: the others would compute the next chunk
            except BaseException as error:  # they wait for what this process didn't compute
                self._stop(error)
                raise

    @classmethod
    def from_params(cls, config: ModelConfig, params: Mapping[str, Any],
                    tokenizer: Tokenizer | str | os.PathLike[str] | None = None, mesh: Mesh | None = None, *,
                    donate: bool = False, **options: Any) -> Self:  # fmt: skip
        """An engine over weights that are in memory already, as arrays of the host or of any devices.

        config: the model's shape. params: as ``update_params`` takes them. tokenizer: a model directory (or a
        Tokenizer); None: prompts are ids. mesh: of any axes, a trainer's for instance: its devices share the model, in
        their order; None: the first ``tensor_parallel_size`` ones. donate: unfused device arrays are used up.
        options: the Engine's keywords.

        Raises ValueError that lists every parameter that doesn't fit, ConfigError for options.
        """
        if not isinstance(config, ModelConfig):
            raise TypeError(
                f"config is a {type(config).__name__}, it must be a ModelConfig: ModelConfig.from_dir(path) reads one"
            )
        if mesh is not None:
            check_devices(mesh)
            mesh = Mesh(mesh.devices.reshape(-1), (TP,))
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            folder, tokenizer = Path(tokenizer), Tokenizer.from_dir(Path(tokenizer))
            if tokenizer is None:
                raise ConfigError(f"tokenizer={str(folder)!r} has no tokenizer's files; None: prompts are ids")
        return cls(startup.GivenModel(config, params, tokenizer, donate), mesh=mesh, **options)  # type: ignore[call-arg]

    def generate_ids(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
                     ) -> np.ndarray:  # fmt: skip
        """Completions as one array, for programs that don't want text: int32 [num_prompts, largest n, longest one].

        prompts: ids in any form that ``generate`` takes, numpy and jax arrays among them. sampling_params: as there.
        Past a completion's end: -1.
        """
        params = self._default_params if sampling_params is None else sampling_params
        outputs = self.generate(prompts, _without_text(params), use_tqdm=False)
        longest = max((len(one.token_ids) for output in outputs for one in output.outputs), default=0)
        most = max((len(output.outputs) for output in outputs), default=0)
        ids = np.full((len(outputs), most, longest), -1, np.int32)
        for i, output in enumerate(outputs):
            for j, one in enumerate(output.outputs):
                ids[i, j, : len(one.token_ids)] = one.token_ids
        return ids

    def reset_prefix_cache(self) -> None:
        """Forgets what blocks hold (after the weights changed); running requests keep their own blocks."""
        self._check_open()
        with self._lock, deferred_interrupts():
            self._group.note("reset")
            self._scheduler.reset_prefix_cache()

    def update_params(self, params: Mapping[str, Any], *, running: str = "refuse", donate: bool = False) -> None:
        """Replaces the model's weights between two steps. Nothing is compiled again, and what is in the prefix cache is
        never matched any more.

        params: host or device arrays of any float dtype (whole numbers are cast, too); either the unfused logical tree,
            {Hugging Face name: array} of ``params.Source``s (or nested dicts and lists of the names' parts), which one
            jitted function fuses, casts and reshards, compiled at its first use; or the tree that the family's forward
            takes, or {path: array} with the paths and shapes of ``models.registry.param_table(config)``, the same at
            any tensor_parallel_size.
        running: what happens to unfinished requests. "refuse": RuntimeError if there are any. "finish": they end under
            the old weights first, and ``step`` returns their outputs afterwards. "restart": their outputs are thrown
            away and they begin anew, under the new weights (a stream of deltas, too, begins anew).
        donate: unfused device arrays are used up; else the caller's arrays stay the caller's.

        Values aren't looked at: NaN weights give token 0 (and nan as its log-probability).
        The new weights take the old ones' memory. Raises ValueError that lists every parameter that doesn't fit; then
        nothing has changed. Any later error (of the device) ends the engine.
        """
        self._check_alone("update_params")
        if running not in ("refuse", "finish", "restart"):
            raise ValueError(f"running={running!r} must be 'refuse', 'finish' or 'restart'")
        with self._lock, deferred_interrupts() as interrupts:
            if running == "refuse" and self._scheduler.has_unfinished():
                raise RuntimeError(
                    f"{len(self._scheduler.requests)} requests are unfinished and hold cache entries of the old "
                    "weights: let them end or abort them first, or pass running='finish' or 'restart'"
                )
            if running == "restart" and self._recorder is not None:
                raise ValueError("running='restart' can't be recorded: stop the recording, or pass running='finish'")
            self._executor.placer.check(params)
            while running == "finish" and self._scheduler.has_unfinished():
                self._advance()
                interrupts.deliver()
            while self._in_flight:
                self._commit(*self._in_flight.popleft())
            if running == "restart":
                self._restart_all()
            self._executor.placer.check(params)  # others may have used them meanwhile
            try:
                old = tables.flatten(self._executor.params)
                self._executor.params = tables.nest(self._executor.placer.place(params, donate=donate, old=old))
            except BaseException as error:  # the old weights' memory may be used up
                self._closed = f"new weights could not be placed: {error}"
                raise
            self._scheduler.reset_prefix_cache()

    def update_weights(self, params: Mapping[str, Any]) -> None:
        """``update_params(params)``, under the name that trainers of vLLM look for."""
        self.update_params(params)

    def _restart_all(self) -> None:
        unfinished = sorted(self._scheduler.requests.values(), key=lambda request: -request.arrival)
        for request in unfinished:  # each goes to the head of the queue, so the last comes first
            self._scheduler.restart(request)
            self._completions[request.request_id].begin_anew()


def _without_text(params: Any) -> Any:
    """Each of them without what needs a detokenizer, but where stop strings do."""
    if isinstance(params, SamplingParams):
        return replace(params, detokenize=bool(params.stop))
    return [_without_text(one) for one in params] if isinstance(params, list | tuple) else params
