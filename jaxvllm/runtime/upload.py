"""From files to parameters on GPUs by way of a little page-locked memory.

``jax.device_put`` copies pageable memory through staging buffers of its own: 8 GB/s for one array at a time on an H200,
where reading from the page cache gives 40 and the bus takes 55. Here a thread reads a span of a parameter into one of
a few page-locked buffers and has the CUDA driver copy it to where it belongs, in an array that jax has allocated.
Nobody else has seen that array yet, so that nothing waits for its bytes but us.

Owns: those buffers and their turns. Must not know: files and formats, meshes, how a driver is called (`cuda`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.runtime.cuda import Cuda, Driver

logger = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20  # for a span of convert's
NUM_BUFFERS = 24  # 16 are read into, the others copied from
MAKERS = 4  # threads
PAGE_BYTES, LARGE_PAGE_BYTES = 4 << 10, 2 << 20
SMALL_BYTES = 1 << 20  # for less, jax's own way


class Span(Protocol):
    """What ``convert`` reads at once: see its ``spans.Span``."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def stretches(self) -> Sequence[tuple[int, int]]:
        """(address, bytes) of where it belongs, in order."""
        ...

    def read_into(self, memory: memoryview) -> None: ...


type Stream[Index] = Callable[[Index, Callable[[Span, int], None]], bool]  # see convert's Parts.stream


@dataclass(slots=True)
class Buffer:
    """Host memory and where it lies: asking numpy for an address takes 20 us of everybody's time."""

    data: memoryview
    address: int
    lanes: dict[Any, Any] = field(default_factory=dict)  # by device
    locked: bool = False
    busy: Any = None  # the lane that copies from it
    target: jax.Array | None = None  # to where: alive until it is there


class Upload:
    """Buffers and a driver; a context manager. Any thread may use it. All arrays are whole when the block has ended.

    A thread reads into one buffer while the driver copies from others: they are taken in turn, so that the one that
    comes up has been copied. num_buffers: made while the caller is still looking at what to load.
    """

    def __init__(self, driver: Driver, num_buffers: int = NUM_BUFFERS) -> None:
        self._driver, self._num_buffers = driver, num_buffers
        self._made: list[Buffer] = []  # by append alone, which needs no lock
        self._failed: list[Exception] = []  # of those that couldn't be made
        self._turns: queue.SimpleQueue[Buffer | Exception] = queue.SimpleQueue()
        self._makers = ThreadPoolExecutor(MAKERS, "buffers")
        self._preparing = threading.Lock()  # several at once would only take turns at Python's, and the readers wait

    def __enter__(self) -> Self:
        try:
            for _ in range(self._num_buffers):
                self._makers.submit(self._make)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Everything is given back, whatever fails on the way; then the first failure is raised."""
        first = error

        def attempt(action: Callable[..., object], *arguments: object) -> None:
            nonlocal first
            try:
                action(*arguments)
            except BaseException as its_error:
                first = first or its_error

        attempt(partial(self._makers.shutdown, cancel_futures=True))
        attempt(self._collect)
        for buffer in self._made:
            attempt(self._wait, buffer)
        for buffer in self._made:
            if buffer.locked:
                attempt(self._driver.unlock, buffer.address)
        attempt(self._driver.close)
        self._made.clear()
        if first is not None and first is not error:
            raise first

    def _collect(self) -> None:
        """Waits until nobody has a buffer any more; who asks for one later gets an error."""
        try:
            for _ in self._made:
                self._turns.get()
        finally:
            self._turns.put(RuntimeError("the upload of parameters has ended"))

    def place[Index](self, stream: Stream[Index], index: Index, shape: Sequence[int], dtype: np.dtype, device: Any
                     ) -> jax.Array | None:  # fmt: skip
        """A part of a parameter on its device; None where it is too small or can't be streamed.

        stream: has what it is given called for each span of the part, in any threads, before this block ends.
        """
        if math.prod(shape) * dtype.itemsize < SMALL_BYTES:
            return None
        with self._preparing:
            array = jax.block_until_ready(_zeros(tuple(shape), dtype, device)())

            def send(span: Span, start: int) -> None:
                self._send(device, array, span, start)

            return array if stream(index, send) else None

    def _send(self, device: Any, target: jax.Array, span: Span, start: int) -> None:
        buffer = self._turns.get()
        try:
            if isinstance(buffer, Exception):
                raise buffer
            self._wait(buffer)
            if span.num_bytes > len(buffer.data):
                raise ValueError(f"a span of {span.num_bytes} bytes doesn't fit into a buffer of {len(buffer.data)}")
            span.read_into(buffer.data)
            if device not in buffer.lanes:
                buffer.lanes[device] = self._driver.lane(device)
            buffer.busy, buffer.target = buffer.lanes[device], target
            moved, source = target.unsafe_buffer_pointer() - start, buffer.address
            for place, num_bytes in span.stretches:
                self._driver.copy(buffer.busy, moved + place, source, num_bytes)
                source += num_bytes
        finally:
            self._turns.put(buffer)

    def _wait(self, buffer: Buffer) -> None:
        if buffer.busy is not None:
            self._driver.wait(buffer.busy)
            buffer.busy = buffer.target = None

    def _make(self) -> None:
        try:
            buffer = _in_large_pages(BUFFER_BYTES)
            pages = np.frombuffer(buffer.data, np.uint8)[::PAGE_BYTES]
            pages[:] = 0  # brings them, in several threads; a lock does it one by one
        except Exception as error:
            self._failed.append(error)
            if len(self._failed) == self._num_buffers:  # who waits for a buffer raises it
                self._turns.put(error)
            return
        self._made.append(buffer)
        try:
            self._driver.lock(buffer.address, len(buffer.data))
            buffer.locked = True
        except Exception as error:  # a limit of the system's: then the driver has it copied once more
            logger.info("memory can't be page-locked, so parameters travel slower: %s", error)
        finally:
            self._turns.put(buffer)


@cache
def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> Callable[[], jax.Array]:
    """Compiled once; ``jnp.zeros`` would take 0.3 ms of Python each time."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=jax.sharding.SingleDeviceSharding(device))


def _in_large_pages(num_bytes: int) -> Buffer:
    """Private memory, since the system gives shared memory no large pages: sooner there, locked and copied."""
    made = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(made, np.uint8).ctypes.data
    start = -address % LARGE_PAGE_BYTES
    return Buffer(memoryview(made)[start : start + num_bytes], address + start)


def open_upload(devices: Sequence[Any]) -> Upload | None:
    """For this process's devices, or None where there is no CUDA driver to ask: then jax's own way does it."""
    if devices[0].platform != "gpu":
        return None
    try:
        return Upload(Cuda(devices))
    except OSError as error:
        logger.info("parameters go to the devices by jax.device_put: %s", error)
        return None
