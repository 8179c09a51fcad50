"""How a load is spread over threads and memory: the one place of its numbers; `bench.convert` tries others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxvllm.convert.memory import aligned


@dataclass(frozen=True, slots=True)
class Pace:
    """What a load may have at the same time.

    parameters: on their way, from their first byte read until they are on their devices. readers: threads that read,
    for all of them together. memory_bytes: host memory of those on their way, at most this together, or one alone.
    allocate: gives host memory that is used again and again (not where the arrays are kept), aligned as ``aligned``'s;
    it is freed with the array, so pinned memory is an array that lets go of it when it dies.
    """

    parameters: int = 4
    readers: int = min(16, max(4, os.cpu_count() or 4))
    memory_bytes: int = 768 << 20
    allocate: Callable[[int], np.ndarray] = aligned

    def __post_init__(self) -> None:
        for name in ("parameters", "readers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes={self.memory_bytes} must be at least 0: then one parameter at a time")


PACE = Pace()
