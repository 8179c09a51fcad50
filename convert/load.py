"""Loading: either format, several parameters at a time, onto whatever the caller's ``place`` puts them on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from jaxvllm.convert.checkpoint import OurReader
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.files import ParallelReader, Piece
from jaxvllm.convert.hf import HFReader, check_folder
from jaxvllm.convert.manifest import MANIFEST
from jaxvllm.convert.memory import FRESH, Lease, Memory
from jaxvllm.convert.pace import PACE, Pace
from jaxvllm.convert.progress import ByteBar
from jaxvllm.convert.spans import Span, address, spans
from jaxvllm.convert.tables import host_dtype, part_shape
from jaxvllm.models.params import Index, ParamInfo, Table

SPAN_BYTES = 8 << 20  # read at once on the way to a GPU (runtime.upload's BUFFER_BYTES)
SPANS_OF_A_JOB = 4  # that are read by one thread in turn: handing over a job takes as much Python as a span


class Reader(AbstractContextManager[Any], Protocol):
    """What both formats offer."""

    path: Path
    format: str

    def problems(self, table: Table) -> list[str]:
        """Everything that keeps this checkpoint from filling ``table``."""
        ...

    def read(self, info: ParamInfo, dtype: np.dtype | None = None, lease: Lease = FRESH) -> np.ndarray:
        """One parameter of a table without problems, in host memory from ``lease``."""
        ...

    def shards(self, info: ParamInfo, dtype: np.dtype, lease: Lease = FRESH) -> Callable[[Index], np.ndarray]:
        """A function index -> that part of the parameter, contiguous, in memory from ``lease``."""
        ...

    def pieces(self, info: ParamInfo, index: Index, out: np.ndarray) -> list[Piece] | None:
        """What fills ``out``, any memory of the part's shape, in long pieces; None where it can't be read like that."""
        ...

    @property
    def threads(self) -> ParallelReader:
        """Those that read."""
        ...


class Parts:
    """One parameter, as a ``place`` asks for its parts."""

    def __init__(self, reader: Reader, info: ParamInfo, dtype: np.dtype, lease: Lease, bar: ByteBar) -> None:
        self.info, self.dtype, self._reader, self._bar = info, dtype, reader, bar
        self.streamed_bytes = 0  # those that the bar hears of from elsewhere
        self._cut = reader.shards(info, dtype, lease)

    def __call__(self, index: Index) -> np.ndarray:
        """A part, contiguous, in host memory that may be used again when ``place`` has returned."""
        return self._cut(index)

    def stream(self, index: Index, send: Callable[[Span, int], None]) -> bool:
        """Has send(span, the address of the part's first byte) called for all of a part, in the reader's threads.

        Returns when the last calls are about to begin; ``load_shards`` returns when all have, and raises what they
        raise, as this does for what was streamed before. send has the span read into memory of its choice
        (``Span.read_into``); nothing lies at the addresses that it hears. False: nothing will be done, since the part
        doesn't lie in pieces as it is wanted.
        """
        shadow = np.empty(part_shape(self.info, index), self.dtype)  # never touched: no memory stands behind it
        pieces = self._reader.pieces(self.info, index, shadow)
        if pieces is None:
            return False
        start = address(shadow)

        def some(several: Sequence[Span]) -> None:
            for span in several:
                send(span, start)
            self._bar.add(sum(span.num_bytes for span in several))

        self.streamed_bytes += shadow.nbytes
        jobs = batched(spans(pieces, SPAN_BYTES), SPANS_OF_A_JOB)
        self._reader.threads.start([partial(some, several) for several in jobs])
        return True


def detect(path: str | os.PathLike[str]) -> str:
    """ "jaxvllm" for a folder with our manifest, "hf" for one with safetensors.

    Raises CheckpointError for anything else, and says what would help.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(path, ["is not a directory; give a folder with config.json and weights"])
    if (folder / MANIFEST).is_file():
        return "jaxvllm"
    check_folder(folder)
    return "hf"


def open_checkpoint(path: str | os.PathLike[str], readers: int = PACE.readers) -> Reader:
    """The reader for this folder's format, with so many threads; a context manager."""
    folder = Path(path)
    return OurReader(folder, readers) if detect(folder) == "jaxvllm" else HFReader(folder, readers)


def verify_table(path: str | os.PathLike[str], table: Table) -> None:
    """Raises CheckpointError with every problem that keeps ``path`` from filling ``table``."""
    with open_checkpoint(path) as reader:
        check(reader, table)


def load_params[Placed](
    path: str | os.PathLike[str],
    table: Table,
    *,
    dtype: DTypeLike,
    put: Callable[[ParamInfo, np.ndarray], Placed],
    pace: Pace = PACE,
) -> dict[str, Placed]:
    """{path: put(info, array)} for every parameter of ``table``; like ``load_shards`` with whole parameters."""

    def place(info: ParamInfo, read: Parts) -> Placed:
        return put(info, read(tuple(slice(0, n) for n in info.shape)))

    return load_shards(path, table, dtype=dtype, place=place, pace=pace)


def load_shards[Placed](
    path: str | os.PathLike[str],
    table: Table,
    *,
    dtype: DTypeLike,
    place: Callable[[ParamInfo, Parts], Placed],
    keeps: bool = True,
    pace: Pace = PACE,
) -> dict[str, Placed]:
    """{path: place(info, read)} for every parameter of ``table`` (the family's, at any tp), in its order.

    dtype: what each parameter is cast to (round to nearest even), a name or a numpy or jax type. place: asks
    ``read(index)`` for the parts it wants, and returns when they are transferred, or ``read.stream``, which goes on
    after it; it is called from several threads.
    keeps: whether a part may still be used (aliased by a CPU array) when ``place`` has returned; where it isn't, its
    memory is used again. pace: how many at a time. Both formats give identical parts. Host memory: the parameters on
    their way, at most one or pace.memory_bytes (768 MB) together, plus one part; for a cast of what is streamed, 8 MB
    in its stored dtype for each reader.

    Raises CheckpointError, before the first ``place``, with everything missing, unused, mis-shaped or damaged.
    """
    wanted = host_dtype(dtype)
    costs = {path: info.size * wanted.itemsize for path, info in table.items()}
    room, memory = _Room(pace.memory_bytes), None if keeps else Memory(pace.memory_bytes)
    with open_checkpoint(path, pace.readers) as reader:
        check(reader, table)
        with ByteBar("Loading", sum(costs.values())) as bar, ThreadPoolExecutor(pace.parameters, "load") as pool:

            def one(info: ParamInfo) -> Placed:
                with room.taken(costs[info.path]), Lease(memory) as lease:
                    parts = Parts(reader, info, wanted, lease, bar)
                    placed = place(info, parts)
                bar.add(costs[info.path] - parts.streamed_bytes)
                return placed

            futures = {info.path: pool.submit(one, info) for info in table.values()}
            try:
                placed = {path: future.result() for path, future in futures.items()}
                reader.threads.finish()
                return placed
            except BaseException:
                reader.threads.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                futures.clear()  # they know the error, which knows this frame and those of ``place``
                raise


class _Room:
    """A budget of bytes; one that is above it waits until it is alone."""

    def __init__(self, num_bytes: int) -> None:
        self._total, self._used = num_bytes, 0
        self._changed = threading.Condition()

    def taken(self, num_bytes: int) -> AbstractContextManager[None]:
        return _Taken(self, num_bytes)

    def take(self, num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + num_bytes <= self._total)
            self._used += num_bytes

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._used -= num_bytes
            self._changed.notify_all()


class _Taken(AbstractContextManager[None]):
    def __init__(self, room: _Room, num_bytes: int) -> None:
        self._room, self._num_bytes = room, num_bytes

    def __enter__(self) -> None:
        self._room.take(self._num_bytes)

    def __exit__(self, *exc: object) -> None:
        self._room.give(self._num_bytes)


def check(reader: Reader, table: Table) -> None:
    """Raises CheckpointError with every problem of an opened checkpoint."""
    problems = reader.problems(table)
    if problems:
        raise CheckpointError(reader.path, problems)
