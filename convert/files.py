"""Bytes of files, read in parallel straight into the arrays where they belong.

Owns: threads, pieces, and what can go wrong while reading. Must not know: formats. Plain reads, not maps: a file that
shrinks meanwhile is an error, not a signal, and host memory is what we allocate.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.memory import FRESH, Lease

PIECE_BYTES = 8 << 20  # what one thread reads at a time, before and after a cast
SMALL_BYTES = 1 << 20  # read at once where they are wanted
MIN_RUN_BYTES = 128 << 10  # a shorter run of bytes isn't worth a read of its own
ENDLESS = 1 << 30


_of_thread = threading.local()  # opened: a pool's OpenFiles, in its threads


class OpenFiles:
    """The last file of each of a pool's threads stays open: opening it for every piece costs a turn at Python each."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Path, int]] = {}  # by thread; each changes its own

    def use(self) -> None:
        """Reads of this thread go by these from now on."""
        _of_thread.opened = self

    def get(self, file: Path) -> int:
        me = threading.get_ident()
        opened = self._of.get(me)
        if opened is not None and (opened[0] is file or opened[0] == file):
            return opened[1]
        if opened is not None:
            os.close(self._of.pop(me)[1])
        self._of[me] = file, _open(file)
        return self._of[me][1]

    def close(self) -> None:
        while self._of:
            os.close(self._of.popitem()[1][1])


def _open(file: Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


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
        self.read_bytes(memoryview(out.view(np.uint8)), first)

    def read_bytes(self, view: memoryview, first: int = 0) -> None:
        """The same with memory of any kind, counted in bytes."""
        start, done, wanted = self.offset_bytes + first * self.dtype.itemsize, 0, len(view)
        opened: OpenFiles | None = getattr(_of_thread, "opened", None)
        try:
            descriptor = _open(self.file) if opened is None else opened.get(self.file)
            try:
                while done < wanted:  # one read returns at most 2 GiB on Linux
                    count = os.preadv(descriptor, [view[done:] if done else view], start + done)
                    if not count:
                        break
                    done += count
            finally:
                if opened is None:
                    os.close(descriptor)
        except OSError as error:
            raise CheckpointError(self.file, [f"{self.name} can't be read: {error.strerror}"]) from error
        if done != wanted:
            raise CheckpointError(self.file, [f"{self.name} ends after {done} of {wanted} bytes: file changed"])


@dataclass(frozen=True, slots=True)
class Piece:
    """A job of one thread: to fill the vector ``out``, in its dtype, with ``stored``'s elements from ``first`` on."""

    stored: Stored
    first: int
    out: np.ndarray

    def __call__(self) -> None:
        if self.out.dtype == self.stored.dtype:
            self.stored.read_into(self.out, self.first)
        else:
            self.out[...] = self.stored.read(self.first, self.out.size)


class ParallelReader:
    """A pool of threads that reads; a context manager. Any thread may use it."""

    def __init__(self, threads: int) -> None:
        self._opened = OpenFiles()
        self._pool = ThreadPoolExecutor(threads, "read", self._opened.use)
        self._started: list[Future[None]] = []
        self._errors: list[BaseException] = []
        self._room = threading.Semaphore(threads)  # for jobs that nobody does yet
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        self._pool.shutdown(cancel_futures=True)  # waits for those that run
        self._opened.close()
        self._started.clear()
        self._errors.clear()  # an error knows the frames that it came through, and those know us and parameters

    def run(self, jobs: Iterable[Callable[[], None]], num_bytes: int) -> None:
        """Does all jobs; raises the first one's error after none runs any more. Few bytes don't wait for a thread."""
        if num_bytes < SMALL_BYTES:
            for job in jobs:
                job()
            return
        futures = [self._pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:  # the memory of those that run may be anybody's afterwards
            wait([future for future in futures if not future.cancel()])
            raise

    def start(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Has all jobs done at some time before ``finish`` returns. Waits while as many as there are threads wait for
        one: who prepares jobs faster than they are done takes Python's lock from those who do them (a load was 15 %
        slower). Raises the first error of any job that was started; after ``stop``, nothing more is.
        """
        for job in jobs:
            self._room.acquire()
            if self._errors or self._stopped:
                self._room.release()  # so that whoever comes next doesn't wait either
                if self._errors:
                    raise self._errors[0]
                return
            self._started.append(self._pool.submit(self._note, job))

    def stop(self) -> None:
        """Nobody waits in ``start`` any more."""
        self._stopped = True
        self._room.release(ENDLESS)

    def finish(self) -> None:
        """Waits for what was started; raises the first error at once: then ``close`` waits for the others."""
        wait(self._started, return_when=FIRST_EXCEPTION)
        if self._errors:
            raise self._errors[0]
        self._started.clear()

    def _note(self, job: Callable[[], None]) -> None:
        self._room.release()
        if self._errors or self._stopped:
            return  # nobody waits for it
        try:
            job()
        except BaseException as error:
            self._errors.append(error)  # in the order in which they came: the first is the cause
            raise

    def read(self, stored: Stored, dtype: np.dtype, lease: Lease = FRESH) -> np.ndarray:
        """An array of ``stored``'s shape, cast to ``dtype`` piece by piece."""
        out = lease.empty(stored.shape, dtype)
        self.run(cut(fill(stored, out)), out.nbytes)
        return out


def fill(stored: Stored, out: np.ndarray) -> Iterator[Piece]:
    """What fills ``out``, whose C order is ``stored``'s, strided as it may be, in ``out``'s dtype: long pieces."""
    first = 0
    for run in contiguous_runs(out):
        yield Piece(stored, first, run)
        first += run.size


def fill_slice(stored: Stored, index: tuple[slice, ...], out: np.ndarray) -> Iterator[Piece] | None:
    """What fills ``out`` with ``stored[index]``; None when its bytes lie in runs too short to be read."""
    starts = [s.start or 0 for s in index]
    whole = len(out.shape)  # axes from here on are read whole
    while whole > 0 and out.shape[whole - 1] == stored.shape[whole - 1]:
        whole -= 1
    axis = max(whole - 1, 0)  # runs cover out.shape[axis:]
    run_size = math.prod(out.shape[axis:])
    if run_size * stored.dtype.itemsize < MIN_RUN_BYTES and run_size != out.size:
        return None
    strides = [math.prod(stored.shape[i + 1 :]) for i in range(len(stored.shape))]

    def pieces() -> Iterator[Piece]:
        for lead in np.ndindex(*out.shape[:axis]):
            place = [*lead, *[0] * (len(out.shape) - axis)]
            first = sum((starts[i] + at) * strides[i] for i, at in enumerate(place))
            yield Piece(stored, first, out[(*lead, ...)].reshape(-1))

    return pieces()


def contiguous_runs(out: np.ndarray) -> Iterator[np.ndarray]:
    """Vectors that view ``out`` in C order, each as long as memory allows: what is written to a copy would be lost."""
    axis = out.ndim  # out[..., axis:] is contiguous
    size = out.itemsize
    while axis > 0 and (out.shape[axis - 1] == 1 or out.strides[axis - 1] == size):
        size *= out.shape[axis - 1]
        axis -= 1
    for lead in np.ndindex(*out.shape[:axis]):
        yield out[(*lead, ...)].reshape(-1)


def shortest_run_bytes(out: np.ndarray) -> int:
    """How long the vectors of ``contiguous_runs`` are."""
    return next(iter(contiguous_runs(out))).nbytes if out.size else 0


def cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same in pieces of at most PIECE_BYTES, before and after the cast, for several threads."""
    for piece in pieces:
        stored, out = piece.stored, piece.out
        step = max(1, PIECE_BYTES // max(stored.dtype.itemsize, out.itemsize))
        for at in range(0, out.size, step):
            yield Piece(stored, piece.first + at, out[at : at + step])
