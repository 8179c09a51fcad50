"""How a load is spread over threads and memory: the one place of its numbers; `bench.convert` tries others."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """What a load may have at the same time.

    parameters: on their way, from their first byte read until they are on their devices. readers: threads that read,
    for all of them together. memory_bytes: host memory of those on their way, at most this together, or one alone.
    """

    parameters: int = 4
    readers: int = min(16, max(4, (os.cpu_count() or 4) - 2))  # two are left to who prepares and to the driver
    memory_bytes: int = 768 << 20

    def __post_init__(self) -> None:
        for name, least, hint in (
            ("parameters", 1, ""), ("readers", 1, ""), ("memory_bytes", 0, ": then one parameter at a time"),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}")


PACE = Pace()
