"""Spans bring every byte to where its piece wants it: compared with a table of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxvllm.convert.files import Piece, Stored
from jaxvllm.convert.spans import Span, address, spans


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("seed", range(20))
def test_every_element_comes_from_its_place(seed: int, dtype: type, tmp_path: Path) -> None:
    """Pieces of several files, at random and one after another, into memory with gaps and without; cast or not."""
    rng = np.random.default_rng(seed)
    most_bytes = int(rng.integers(1, 30)) * np.dtype(dtype).itemsize
    files = []
    for number in range(2):
        values = rng.integers(0, 200, 300, dtype=np.uint8)
        values.tofile(tmp_path / str(number))
        files.append((Stored(str(number), np.dtype(np.uint8), (300,), tmp_path / str(number), 0), values))
    memory, want = np.zeros(2000, dtype), np.zeros(2000, dtype)
    pieces, at, first = [], 0, 0
    for _ in range(rng.integers(1, 12)):
        stored, values = files[rng.integers(2)]
        size = int(rng.integers(0, 80))
        first = first if rng.random() < 0.5 else int(rng.integers(0, 220))  # often where the last one ended
        first = min(first, 300 - size)
        at += 0 if rng.random() < 0.5 else int(rng.integers(0, 50))
        pieces.append(Piece(stored, first, memory[at : at + size]))
        want[at : at + size] = values[first : first + size]
        at, first = at + size, first + size
    made = list(spans(pieces, most_bytes))
    assert sum(span.size for span in made) == sum(piece.out.size for piece in pieces)
    base, bytes_of_memory = address(memory), memory.view(np.uint8)
    for span in made:
        assert 0 < span.num_bytes <= most_bytes and span.num_bytes == sum(n for _, n in span.stretches)
        assert all(a + n != b for (a, n), (b, _) in zip(span.stretches, span.stretches[1:], strict=False))  # joined
        buffer = bytearray(most_bytes + 3)
        span.read_into(memoryview(buffer))
        source = 0
        for place, num_bytes in span.stretches:
            bytes_of_memory[place - base : place - base + num_bytes] = np.frombuffer(
                buffer, np.uint8, num_bytes, source
            )
            source += num_bytes
        assert buffer[span.num_bytes :] == bytes(len(buffer) - span.num_bytes)  # nothing behind it
    np.testing.assert_array_equal(memory, want)


def test_neighbours_are_read_at_once(tmp_path: Path) -> None:
    stored = Stored("x", np.dtype(np.int16), (100,), tmp_path / "x", 0)
    out = np.zeros((4, 50), np.int16)
    rows = [Piece(stored, 25 * row, out[row, 10:35]) for row in range(4)]
    made: list[Span] = list(spans(rows, 120))
    assert [(span.first, span.size, len(span.stretches)) for span in made] == [(0, 60, 3), (60, 40, 2)]


def test_a_cast_to_another_kind_of_the_same_size_is_a_cast(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int16)
    values.tofile(tmp_path / "x")
    out = np.empty(10, np.float16)
    (span,) = spans([Piece(Stored("x", values.dtype, (10,), tmp_path / "x", 0), 0, out)], 100)
    buffer = bytearray(100)
    span.read_into(memoryview(buffer))
    assert np.frombuffer(buffer, np.float16, 10).tolist() == values.tolist()
