"""Bytes of files, read in parallel straight into the arrays where they belong.

Owns: threads, pieces, and what can go wrong while reading. Must not know: formats. Plain reads, not maps: a file that
shrinks meanwhile is an error, not a signal, and host memory is what we allocate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.memory import FRESH, Lease

PIECE_BYTES = 16 << 20  # what one thread reads at a time
MIN_RUN_BYTES = 128 << 10  # a shorter run of bytes isn't worth a read of its own


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one array lies as plain little-endian C-order bytes. name: for messages."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """The whole array, or ``count`` elements from the flat index ``first`` as a vector; a fresh array.

        Raises CheckpointError when the file no longer holds these bytes.
        """
        data = np.empty(math.prod(self.shape) if count is None else count, self.dtype)
        self.read_into(data, first)
        return data.reshape(self.shape) if count is None else data

    def read_into(self, out: np.ndarray, first: int = 0) -> None:
        """Fills the vector ``out`` (contiguous, this dtype) from the flat index ``first`` on."""
        view = memoryview(out.view(np.uint8))
        done = 0
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                start = self.offset_bytes + first * self.dtype.itemsize
                while done < len(view):  # one read returns at most 2 GiB on Linux
                    count = os.preadv(descriptor, [view[done:]], start + done)
                    if not count:
                        break
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(self.file, [f"{self.name} can't be read: {error.strerror}"]) from error
        if done != len(view):
            raise CheckpointError(self.file, [f"{self.name} ends after {done} of {len(view)} bytes: file changed"])


class ParallelReader:
    """A pool of threads that reads; a context manager. Any thread may use it."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Does all jobs; raises the first one's error after none runs any more."""
        futures = [self._pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def read(self, stored: Stored, dtype: np.dtype, lease: Lease = FRESH) -> np.ndarray:
        """An array of ``stored``'s shape, cast to ``dtype`` piece by piece."""
        out = lease.empty(stored.shape, dtype)
        self.run(fill(stored, out))
        return out


def fill(stored: Stored, out: np.ndarray) -> Iterator[Callable[[], None]]:
    """Jobs that fill ``out``, whose C order is ``stored``'s, strided as it may be, in ``out``'s dtype."""
    first = 0
    for run in contiguous_runs(out):
        yield from _pieces(stored, run, first)
        first += run.size


def fill_slice(stored: Stored, index: tuple[slice, ...], out: np.ndarray) -> Iterator[Callable[[], None]] | None:
    """Jobs that fill ``out`` with ``stored[index]``; None when its bytes lie in runs too short to be read."""
    starts = [s.start or 0 for s in index]
    whole = len(out.shape)  # axes from here on are read whole
    while whole > 0 and out.shape[whole - 1] == stored.shape[whole - 1]:
        whole -= 1
    axis = max(whole - 1, 0)  # runs cover out.shape[axis:]
    run_size = math.prod(out.shape[axis:])
    if run_size * stored.dtype.itemsize < MIN_RUN_BYTES and run_size != out.size:
        return None
    strides = [math.prod(stored.shape[i + 1 :]) for i in range(len(stored.shape))]

    def jobs() -> Iterator[Callable[[], None]]:
        for lead in np.ndindex(*out.shape[:axis]):
            place = [*lead, *[0] * (len(out.shape) - axis)]
            first = sum((starts[i] + at) * strides[i] for i, at in enumerate(place))
            yield from _pieces(stored, out[lead].reshape(-1), first)

    return jobs()


def contiguous_runs(out: np.ndarray) -> Iterator[np.ndarray]:
    """Vectors that view ``out`` in C order, each as long as memory allows."""
    axis = out.ndim  # out[..., axis:] is contiguous
    size = out.itemsize
    while axis > 0 and (out.shape[axis - 1] == 1 or out.strides[axis - 1] == size):
        size *= out.shape[axis - 1]
        axis -= 1
    for lead in np.ndindex(*out.shape[:axis]):
        yield out[lead].reshape(-1)


def shortest_run_bytes(out: np.ndarray) -> int:
    """How long the vectors of ``contiguous_runs`` are."""
    return next(iter(contiguous_runs(out))).nbytes if out.size else 0


def _pieces(stored: Stored, out: np.ndarray, first: int) -> Iterator[Callable[[], None]]:
    step = max(1, PIECE_BYTES // stored.dtype.itemsize)
    for at in range(0, out.size, step):
        yield lambda part=out[at : at + step], begin=first + at: _read_piece(stored, part, begin)


def _read_piece(stored: Stored, out: np.ndarray, first: int) -> None:
    if out.dtype == stored.dtype:
        stored.read_into(out, first)
    else:
        out[...] = stored.read(first, out.size)


def checksum(array: np.ndarray) -> str:
    """XXH3, 128 bits, of an array's bytes in C order (Collet, https://github.com/Cyan4973/xxHash)."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def file_checksum(file: Path) -> str:
    """XXH3, 128 bits, of a whole file."""
    state, buffer = xxhash.xxh3_128(), bytearray(min(PIECE_BYTES, file.stat().st_size + 1))
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            state.update(view[:count])
    return state.hexdigest()
