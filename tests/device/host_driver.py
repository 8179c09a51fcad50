"""A driver for `runtime.upload` whose devices are CPU devices."""

from __future__ import annotations

import ctypes
import threading
from typing import Any


class Host:
    """Addresses of CPU arrays are the host's own. Copies as late as it may: when somebody waits.

    refuses: calls that fail always, as a dead context's do; at_exit: only those of the thread that ends the upload.
    """

    def __init__(self, *refuses: str, at_exit: bool = False, error: type[BaseException] = OSError) -> None:
        self.locked: dict[int, int] = {}  # addresses and bytes
        self.lanes: list[tuple[Any, list[tuple[int, int, int]]]] = []
        self.copied_bytes, self.closed, self.unlocks = 0, 0, 0
        self.refuses, self.at_exit, self.error = refuses, at_exit, error
        self._lock = threading.Lock()

    def _may(self, name: str) -> None:
        if name in self.refuses and (not self.at_exit or threading.current_thread() is threading.main_thread()):
            raise self.error(f"{name} gave 700")

    def lock(self, address: int, num_bytes: int) -> None:
        self._may("lock")
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        sources = [source for _, copies in self.lanes for _, source, _ in copies]
        assert not any(address <= source < address + self.locked.get(address, 1) for source in sources)
        self.unlocks += 1
        self._may("unlock")
        del self.locked[address]

    def lane(self, device: Any) -> tuple[Any, list[tuple[int, int, int]]]:
        self._may("lane")
        self.lanes.append((device, []))
        return self.lanes[-1]

    def copy(self, lane: tuple[Any, list[tuple[int, int, int]]], to: int, source: int, num_bytes: int) -> None:
        self._may("copy")
        held = self.locked.copy().items()
        assert any(a <= source and source + num_bytes <= a + n for a, n in held) or "lock" in self.refuses
        lane[1].append((to, source, num_bytes))

    def wait(self, lane: tuple[Any, list[tuple[int, int, int]]]) -> None:
        copies = lane[1]
        try:
            self._may("wait")
            for copy in copies:
                ctypes.memmove(*copy)
                with self._lock:
                    self.copied_bytes += copy[2]
        finally:
            copies.clear()

    def close(self) -> None:
        self.closed += 1
        self._may("close")
