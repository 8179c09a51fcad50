"""A client beside the engine's loop: hands in requests when their time has come, notes when each token is seen.

Owns: the wall clock of a run. Must not know: what the figures are for. Times are seconds since the run's start. The
client sits in the loop that calls Engine.step(), as a server's does: a request can enter between two steps only, and
its wait for that counts. Before a run, what start-up left is collected and frozen (gc.freeze), as servers do, so that
Python's collector, which stays on, needn't walk over it; its longest pause is noted.
"""

import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxvllm import Engine, RequestOutputKind, SamplingParams


class Source:
    """Requests of two kinds: some come at their time, the others are a backlog, of which `ahead` always wait."""

    def __init__(
        self, timed: Iterable[tuple[float, np.ndarray]], backlog: Iterable[np.ndarray] = (), ahead: int = 0
    ) -> None:
        """timed: (time, prompt), in order; with a backlog, they count only while there is some of it."""
        self._timed, self._backlog, self._ahead = deque(timed), deque(backlog), ahead
        self._closed_loop = bool(self._backlog)

    def take(self, now: float, num_waiting: int) -> Iterator[tuple[float, np.ndarray]]:
        """(time, prompt) of those to hand in now."""
        while self._timed and self._timed[0][0] <= now:
            yield self._timed.popleft()
            num_waiting += 1
        while self._backlog and num_waiting < self._ahead:
            yield now, self._backlog.popleft()
            num_waiting += 1
        if self._closed_loop and not self._backlog:
            self._timed.clear()

    @property
    def next_time(self) -> float | None:
        """When the next one comes; None: never."""
        return self._timed[0][0] if self._timed else None


@dataclass(slots=True)
class Served:
    """One request: when it came, and when each of its tokens was seen."""

    arrival_s: float
    prompt_len: int
    token_s: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def first_token_s(self) -> float:
        """From its arrival."""
        return self.token_s[0] - self.arrival_s


@dataclass(slots=True)
class Run:
    """Everybody who came, and the longest pause of Python's collector."""

    served: list[Served]
    longest_collection_s: float

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(one.token_s[-1] for one in self.served if one.token_s)

    def rate(self, after_s: float, until_s: float) -> float:
        """Output tokens a second, of those seen in this time."""
        seen = np.concatenate([one.token_s for one in self.served])
        return float(((seen > after_s) & (seen <= until_s)).sum() / (until_s - after_s))

    def gaps_s(self, longest_prompt: int | None = None) -> np.ndarray:
        """Times between two tokens of a request, of all requests or those with prompts up to `longest_prompt`."""
        chosen = [one for one in self.served if longest_prompt is None or one.prompt_len <= longest_prompt]
        return np.concatenate([np.zeros(0), *(np.diff(one.token_s) for one in chosen)])


def drive(engine: Engine, source: Source, output_len: int, limit_s: float) -> Run:
    """Serves everything in `source`. What isn't done after limit_s is aborted."""
    params = SamplingParams(
        temperature=0.6, max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    served: dict[str, Served] = {}
    with _watched_collector() as pauses:
        started = time.perf_counter()
        while True:
            now = time.perf_counter() - started
            if now > limit_s:
                _abort_all(engine, served)
                break
            for arrival_s, prompt in source.take(now, engine._scheduler.num_waiting):
                served[engine.add_request(prompt, params)] = Served(arrival_s, len(prompt))
            if engine.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter() - started
                for output in outputs:
                    one = served[output.request_id]
                    one.token_s += [now] * len(output.outputs[0].token_ids)
                    one.finished = output.finished
            elif source.next_time is None:
                break
            else:
                time.sleep(max(0.0, min(source.next_time, limit_s) - now))
    return Run(list(served.values()), max(pauses, default=0.0))


def _abort_all(engine: Engine, served: dict[str, Served]) -> None:
    for name, one in served.items():
        if not one.finished:
            engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()


@contextmanager
def _watched_collector() -> Iterator[list[float]]:
    """Collects and freezes, then yields the list that gets the seconds of each collection."""
    pauses: list[float] = []
    began = [0.0]

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began[0])

    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
