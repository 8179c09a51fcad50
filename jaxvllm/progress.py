"""A progress bar over requests, with prefill and decode tokens per second."""

from __future__ import annotations

import time
from types import TracebackType

from jaxvllm.core.step import Counters

SHOW_EVERY_S = 0.25


class Progress:
    """``with Progress(n, counters) as p``; ``p.finished_one()`` per request, ``p.show(counters)`` per step.

    Drawn 4 times a second.

    The rates are those since the bar began: tokens of each kind over the time spent in steps of that kind isn't known
    while steps overlap, so both are over the whole time.
    """

    def __init__(self, total: int, counters: Counters, *, enabled: bool) -> None:
        """total: requests. counters: the scheduler's, before the first step; the rates count from there."""
        self._bar = None
        if enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Generating", unit="req", dynamic_ncols=True)
        self._started = self._shown = time.perf_counter()
        self._first = counters.prefill_tokens, counters.decode_tokens

    def __enter__(self) -> Progress:
        return self

    def finished_one(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def show(self, counters: Counters) -> None:
        """counters: the scheduler's, counted since the engine's start."""
        if self._bar is None:
            return
        tokens = counters.prefill_tokens, counters.decode_tokens
        now = time.perf_counter()
        if now - self._shown < SHOW_EVERY_S and self._bar.n < (self._bar.total or 0):
            return
        self._shown = now
        seconds = max(now - self._started, 1e-9)
        prefill, decode = ((now - then) / seconds for now, then in zip(tokens, self._first, strict=True))
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
