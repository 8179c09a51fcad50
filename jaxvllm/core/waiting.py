"""The two orders of service: first come, first served; and by priority.

Each is the waiting queue itself, plus the choice of a victim among the running. Owns that order. Must not know about
blocks, rows or steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from jaxvllm.core.request import Request


class FirstComeFirstServed(deque[Request]):
    """Newcomers at the end; who was preempted at the head, before all of them."""

    def put_back(self, request: Request) -> None:
        """`request` was preempted."""
        self.appendleft(request)

    def victim(self, running: Sequence[Request]) -> Request:
        """Who started last: it has the least to lose, and its blocks feed those before it."""
        return running[-1]


class ByPriority(list[Request]):
    """Sorted by (priority, arrival), smaller first. Who was preempted stands where its own key puts it."""

    def append(self, request: Request) -> None:  # type: ignore[override]
        """A newcomer."""
        insort(self, request, key=urgency)

    put_back = append

    def victim(self, running: Sequence[Request]) -> Request:
        """The least urgent, wherever it stands."""
        return max(running, key=urgency)


def urgency(request: Request) -> tuple[int, int]:
    """Smaller is served first. Arrival numbers differ, so there are no ties."""
    return request.priority, request.arrival


WAITING = {"fcfs": FirstComeFirstServed, "priority": ByPriority}
