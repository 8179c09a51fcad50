"""Progress bars over bytes, with their rate; on a terminal only, and only for what takes a while."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

SHOW_AFTER_S = 1.0


class ByteBar:
    """``with ByteBar("Loading", total_bytes) as bar: bar.add(n)``; any thread may add. Silent without a terminal."""

    def __init__(self, what: str, total_bytes: int) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, dynamic_ncols=True, disable=None,
                         delay=SHOW_AFTER_S, leave=False)  # fmt: skip
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._bar.update(num_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
