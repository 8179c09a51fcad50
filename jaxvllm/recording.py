"""Recordings: what a scheduler did, one entry for each call of schedule(), as JSON that `jaxvllm.replay` replays.

    with jaxvllm.record(engine, "run.json"):       or       Engine(..., record="run.json")
        engine.generate(...)                                (written when the engine is closed)

Owns the form of a recording (docs/recordings.md). Must not know about devices or text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.core import Request, ScheduledStep, Scheduler

MAX_BLOCKS = 4096
"""Pools up to this size are recorded block by block; of larger ones only the number of free blocks is."""

BY_COMPLETIONS = "completions"
"""The sampled_token_rule of our own recordings: the tokens are those under "completions"."""

Number = Callable[[Request], int]


def step_record(scheduler: Scheduler, step: ScheduledStep | None, number: Number, *, blocks: bool) -> dict[str, Any]:
    """The entry of a schedule() call that just returned `step`, but for what its commit adds (`committed`)."""
    admitted = scheduler.admitted_now
    record: dict[str, Any] = {"kind": None, "scheduled": []}
    if step is not None:
        chunks = zip(map(number, step.requests), step.starts.tolist(), step.num_tokens.tolist(), strict=True)
        record |= {"kind": step.kind, "scheduled": [list(chunk) for chunk in chunks]}
    record |= {
        "preempted": [number(request) for request in scheduler.preempted_now],
        "admitted": [number(request) for request in admitted if request.num_admissions == 1],
        "resumed": [number(request) for request in admitted if request.num_admissions > 1],
        "computed_at_admission": [[number(request), request.num_cached_tokens] for request in admitted],
        "waiting": [number(request) for request in scheduler.waiting],
        "running": [number(request) for request in scheduler.running],
        "num_free_blocks": scheduler.pool.num_free,
        "finished": [],
    }
    if blocks:
        requests = step.requests if step is not None else []
        record["block_tables"] = {str(number(request)): request.block_table for request in requests}
        record["free"] = scheduler.pool.free_blocks()
    return record


def committed(record: dict[str, Any], scheduler: Scheduler, finished: Iterable[Request], number: Number) -> None:
    """Add what the commits after this schedule() changed; call it at least once."""
    record["finished"] += [number(request) for request in finished]
    if "free" in record:
        record["cached_blocks_after"] = scheduler.pool.cached_blocks()


class Recorder:
    """Stands where `scheduler` stood, passes every call on to it, and notes what happens.

    The scheduler must be idle when this begins, with no step in flight; its cached prefixes are forgotten.
    """

    def __init__(self, scheduler: Scheduler, scheduling_policy: str, async_steps: int) -> None:
        if scheduler.has_unfinished():
            raise ValueError("a recording begins when no request is being served: finish or abort them first")
        scheduler.reset_prefix_cache()
        self.scheduler = scheduler
        self._numbers: dict[Request, int] = {}
        self._wishes: list[dict[str, Any]] = []
        self._events: list[list[Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._blocks = scheduler.pool.num_blocks <= MAX_BLOCKS
        self._head: dict[str, Any] = {
            "format": 1,
            "policy": scheduling_policy,
            "config": {
                "block_size": scheduler.block_size,
                "num_blocks": scheduler.pool.num_blocks,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_model_len": scheduler.max_model_len,
                "max_running": None if scheduler.rows.growable else scheduler.rows.num_rows,
                "enable_prefix_caching": scheduler.pool.enable_prefix_caching,
                "async_steps": async_steps,
                **asdict(scheduler.rules),
            },
        }
        if self._blocks:
            self._head["free_at_start"] = scheduler.pool.free_blocks()

    def __getattr__(self, name: str) -> Any:
        """Whatever isn't noted is the scheduler's."""
        return getattr(self.scheduler, name)

    def add(self, request: Request) -> None:
        """Scheduler.add, noted."""
        self.scheduler.add(request)
        self._numbers[request] = len(self._wishes)
        wish = {
            "request_id": request.request_id,
            "arrival_step": len(self._steps),
            "prompt": request.prompt_token_ids.tolist(),
            "max_tokens": request.token_limit - request.num_prompt,
            "end_token_ids": sorted(request.eos_token_ids),
            "priority": request.priority,
        }
        if request.has_siblings:
            wish["has_siblings"] = True
        self._wishes.append(wish)

    def schedule(self) -> ScheduledStep | None:
        """Scheduler.schedule, noted."""
        step = self.scheduler.schedule()
        record = step_record(self.scheduler, step, self._number, blocks=self._blocks)
        committed(record, self.scheduler, (), self._number)
        self._steps.append(record)
        return step

    def commit(self, step: ScheduledStep, tokens: np.ndarray) -> list[Request]:
        """Scheduler.commit, noted."""
        finished = self.scheduler.commit(step, tokens)
        if self._steps:
            committed(self._steps[-1], self.scheduler, finished, self._number)
        return finished

    def abort(self, request_id: str) -> Request | None:
        """Scheduler.abort, noted."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._events.append([len(self._steps), "abort", self._number(request)])
        return request

    def stop(self, request: Request, stop_reason: str) -> None:
        """Scheduler.stop, noted as an abort: in a recording there is no text."""
        if request.finish_reason is None:
            self._events.append([len(self._steps), "abort", self._number(request)])
        self.scheduler.stop(request, stop_reason)

    def reset_prefix_cache(self) -> None:
        """Scheduler.reset_prefix_cache, noted."""
        self.scheduler.reset_prefix_cache()
        self._events.append([len(self._steps), "reset"])

    def _number(self, request: Request) -> int:
        return self._numbers[request]

    def as_dict(self) -> dict[str, Any]:
        """The recording so far."""
        requests = list(self._numbers)
        times = ("arrival_time", "admitted_time", "first_token_time", "finished_time")
        return self._head | {
            "requests": [
                wish | {name: round(getattr(request, name), 6) for name in times}
                for wish, request in zip(self._wishes, requests, strict=True)
            ],
            "events": self._events,
            "sampled_token_rule": BY_COMPLETIONS,
            "complete": not self.scheduler.has_unfinished(),
            "steps": self._steps,
            "completions": {str(i): request.output_token_ids for i, request in enumerate(requests)},
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """The recording so far as a JSON file, one step a line."""
        data = self.as_dict()
        steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in data.pop("steps"))
        head = json.dumps(data, separators=(",", ":"))
        Path(path).write_text(f'{head[:-1]},"steps":[\n{steps}\n]}}\n', encoding="utf-8")


def writable(path: str | os.PathLike[str]) -> Path:
    """The path, or a ValueError if no file can be written there, before hours of serving end with that."""
    file = Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"record={str(file)!r} can't be written: give a file in a folder that exists and is writable")
    return file


@contextmanager
def record(engine: Any, path: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Record what `engine` does inside the block, and write it to `path` at the end, also after an error.

    ValueError if the engine is serving requests, is recording already, or can't write there. Cached prefixes are
    forgotten at the start.
    """
    file = writable(path)
    recorder = engine.start_recording()
    try:
        yield recorder
    finally:
        engine.stop_recording()
        recorder.write(file)
