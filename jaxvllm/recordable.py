"""The part of an engine that notes its own schedule: start and stop. Of the engine's room, like startup.

Owns how a recorder takes the scheduler's place. Must not know what a recording looks like (`recording`).
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, cast

from jaxvllm.config import ConfigError, EngineConfig
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.distributed import Alone
from jaxvllm.recording import Recorder, writable


class Recordable:
    """What `jaxvllm.record` asks of an engine."""

    config: EngineConfig
    _scheduler: Scheduler
    _group: Alone
    _check_open: Any
    _in_flight: deque[Any]
    _closed: str
    _record_path: Path | None
    _recorder: Recorder | None = None

    def _advance(self) -> Any:
        raise NotImplementedError

    def start_recording(self) -> Recorder:
        """From now on every step is noted; ``jaxvllm.record`` calls this. ValueError while requests are served."""
        self._check_open()
        if self._recorder is not None:
            raise ValueError("the engine is recording already: stop that first")
        while self._in_flight and not self._scheduler.has_unfinished():
            self._advance()
        self._group.note("reset")  # a recording begins without cached prefixes
        self._recorder = Recorder(self._scheduler, self.config.scheduling_policy, self.config.async_steps)
        self._scheduler = cast(Scheduler, self._recorder)  # it passes everything on
        return self._recorder

    def stop_recording(self) -> None:
        """Nothing more is noted."""
        if self._recorder is not None:
            self._scheduler, self._recorder = self._recorder.scheduler, None

    def _write_recording(self) -> None:
        """What ``record=`` asked for, once, unless an error ended the engine."""
        if self._record_path is not None and self._recorder is not None and not self._closed:
            self._recorder.write(self._record_path)


def record_path(record: str | os.PathLike[str] | None) -> Path | None:
    """The Engine's ``record``. ConfigError if no file can be written there."""
    try:
        return None if record is None else writable(record)
    except ValueError as error:
        raise ConfigError(str(error)) from None
