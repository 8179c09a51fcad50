"""Ctrl-C where the books agree, never in between: an interrupted call leaves an engine that still serves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Held:
    """SIGINTs that came during a `deferred_interrupts` block and weren't delivered yet."""

    def __init__(self) -> None:
        self._frames: list[FrameType | None] = []
        self._previous: Any = None

    def __bool__(self) -> bool:
        return bool(self._frames)

    def hold(self, number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)

    def deliver(self) -> None:
        """Calls the handler that was there before the block; Python's own raises KeyboardInterrupt from here.

        The block's clean-up (``finally``) still runs with interrupts held back: a second Ctrl-C can't cut it short.
        """
        if self._frames and callable(self._previous):
            frame = self._frames[-1]
            self._frames.clear()
            self._previous(signal.SIGINT, frame)


@contextmanager
def deferred_interrupts() -> Iterator[Held]:
    """Holds SIGINT back until the block ends or asks for it; other threads than the main one never see it.

    A wait for the device can't be interrupted anyway: Python runs handlers when the call has returned. About 3 us.
    """
    held = Held()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield held  # the second: a handler that wasn't set from Python couldn't be put back
        return
    held._previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, held.hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, held._previous)
        if held:
            signal.raise_signal(signal.SIGINT)
