"""What one read brings on the way to a GPU, by memory that isn't where it belongs (``runtime.upload``).

Owns: how pieces become reads. Must not know: threads, formats, devices. There are thousands in a load and one
interpreter for all its threads, so a span is made and read in as few steps as may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxvllm.convert.files import Piece, Stored


@dataclass(slots=True)
class Span:
    """``size`` elements of ``stored`` from ``first`` on, num_bytes in ``dtype``.

    stretches: (address, bytes) of where they belong, in the file's order.
    """

    stored: Stored
    first: int
    dtype: np.dtype
    size: int = 0
    num_bytes: int = 0
    stretches: list[tuple[int, int]] = field(default_factory=list)

    def read_into(self, memory: memoryview) -> None:
        """Fills the first num_bytes of ``memory``."""
        if self.dtype == self.stored.dtype:
            self.stored.read_bytes(memory[: self.num_bytes], self.first)
        else:
            np.frombuffer(memory, self.dtype, self.size)[...] = self.stored.read(self.first, self.size)


def spans(pieces: Iterable[Piece], most_bytes: int) -> Iterator[Span]:
    """The pieces, of any length, in spans of at most most_bytes, before and after a cast, or of one element: cut where
    they are long, joined where they follow each other."""
    span = None
    for piece in pieces:
        stored, first, place = piece.stored, piece.first, address(piece.out)
        dtype, left = piece.out.dtype, piece.out.size
        itemsize = dtype.itemsize
        most = max(1, most_bytes // max(itemsize, stored.dtype.itemsize))
        while left:
            if span is None or span.stored is not stored or span.first + span.size != first or span.size == most:
                if span is not None:
                    yield span
                span = Span(stored, first, dtype)
            size = min(left, most - span.size)
            num_bytes = size * itemsize
            start, length = span.stretches[-1] if span.stretches else (0, 0)
            if start + length == place:
                span.stretches[-1] = start, length + num_bytes
            else:
                span.stretches.append((place, num_bytes))
            span.size, span.num_bytes = span.size + size, span.num_bytes + num_bytes
            first, place, left = first + size, place + num_bytes, left - size
    if span is not None:
        yield span


def address(array: np.ndarray) -> int:
    """Where an array's first byte lies, a tenth as long in coming as ``array.ctypes.data``."""
    return array.__array_interface__["data"][0]
