"""From files to parameters on GPUs by way of a little page-locked memory.

``jax.device_put`` copies pageable memory through staging buffers of its own: 8 GB/s for one array at a time on an H200,
where reading from the page cache gives 40 and the bus takes 55. Here each thread that reads has one page-locked buffer;
it reads a piece of a parameter and has the CUDA driver copy it to where it belongs, in an array that jax has allocated.
Nobody else has seen that array yet, so that nothing waits for its bytes but us.

Owns: those buffers and copies. Must not know: files and formats, meshes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20  # for a piece of convert's: 24 stay in a large processor's cache, 1.4 times as fast as 16 MB
NUM_BUFFERS = 24  # 16 are read into, the others copied from
MAKERS = 4  # threads
PAGE_BYTES, LARGE_PAGE_BYTES = 4 << 10, 2 << 20
SMALL_BYTES = 1 << 20  # for less, jax's own way


class Piece(Protocol):
    """What ``convert`` reads at once."""

    @property
    def out(self) -> np.ndarray:
        """Of its size and dtype."""
        ...

    def read_into(self, out: np.ndarray) -> None: ...


type Stream[Index] = Callable[[Index, Callable[[Piece, int], None]], bool]  # see convert's Parts.stream


class Driver(Protocol):
    """The calls of CUDA that this needs; addresses are int. A lane: copies to one device, one after another."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Keeps host memory where it is, for the copies of all devices."""
        ...

    def unlock(self, address: int) -> None: ...

    def lane(self, device: Any) -> Any: ...

    def copy(self, lane: Any, to: int, source: int, num_bytes: int) -> None:
        """From locked host memory to the lane's device; returns before it is there."""
        ...

    def wait(self, lane: Any) -> None:
        """Returns when everything is there."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Buffer:
    """Host memory, uint8, and where it lies: asking numpy for an address takes 20 us of everybody's time."""

    data: np.ndarray
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
        self._driver = driver
        self._made: list[Buffer] = []  # by append alone, which needs no lock
        self._turns: queue.SimpleQueue[Buffer | Exception] = queue.SimpleQueue()
        self._makers = ThreadPoolExecutor(MAKERS, "buffers")
        for _ in range(num_buffers):
            self._makers.submit(self._make)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._makers.shutdown(cancel_futures=True)
        failed: OSError | None = None
        for buffer in self._made:
            try:
                self._wait(buffer)
            except OSError as its_error:
                failed = failed or its_error
        for buffer in self._made:
            if buffer.locked:
                self._driver.unlock(buffer.address)
        self._made.clear()
        self._driver.close()
        if failed is not None and error is None:
            raise failed

    def place[Index](self, stream: Stream[Index], index: Index, shape: Sequence[int], dtype: np.dtype, device: Any
                     ) -> jax.Array | None:  # fmt: skip
        """A part of a parameter on its device; None where it is too small or can't be streamed.

        stream: has what it is given called for each piece of the part, in any threads, before this block ends.
        """
        if math.prod(shape) * dtype.itemsize < SMALL_BYTES:
            return None
        array = jax.block_until_ready(_zeros(tuple(shape), dtype, device)())

        def send(piece: Piece, offset: int) -> None:
            self._send(device, array, offset, piece)

        return array if stream(index, send) else None

    def _send(self, device: Any, target: jax.Array, offset: int, piece: Piece) -> None:
        buffer = self._turns.get()
        try:
            if isinstance(buffer, Exception):
                raise buffer
            self._wait(buffer)
            num_bytes = piece.out.nbytes
            piece.read_into(buffer.data[:num_bytes].view(piece.out.dtype))
            if device not in buffer.lanes:
                buffer.lanes[device] = self._driver.lane(device)
            buffer.busy, buffer.target = buffer.lanes[device], target
            self._driver.copy(buffer.busy, target.unsafe_buffer_pointer() + offset, buffer.address, num_bytes)
        finally:
            self._turns.put(buffer)

    def _wait(self, buffer: Buffer) -> None:
        if buffer.busy is not None:
            self._driver.wait(buffer.busy)
            buffer.busy = buffer.target = None

    def _make(self) -> None:
        try:
            buffer = _in_large_pages(BUFFER_BYTES)
            buffer.data[::PAGE_BYTES] = 0  # its pages come here, in several threads; a lock brings them one by one
        except Exception as error:  # who waits for a buffer raises it
            self._turns.put(error)
            return
        self._made.append(buffer)
        try:
            self._driver.lock(buffer.address, len(buffer.data))
            buffer.locked = True
        except OSError as error:  # a limit of the system's: then the driver has it copied once more
            logger.info("memory can't be page-locked, so parameters travel slower: %s", error)
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
    data = np.frombuffer(made, np.uint8)
    start = -data.ctypes.data % LARGE_PAGE_BYTES
    data = data[start : start + num_bytes]
    return Buffer(data, data.ctypes.data)


class Cuda:
    """The CUDA driver, in jax's own (primary) contexts. Raises OSError where there is none.

    Calls that return at once keep the interpreter's lock. Letting go of it and getting it back among sixteen threads
    takes 0.1 ms, and all take their turns: four times a piece, that was as long as reading.
    """

    PORTABLE = 1  # locked for all contexts
    NON_BLOCKING = 1  # doesn't wait for the default stream
    NOT_READY = 600

    def __init__(self, devices: Sequence[Any]) -> None:
        self._slow = ctypes.CDLL("libcuda.so.1")  # others run meanwhile
        self._quick = ctypes.PyDLL("libcuda.so.1")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lanes: list[tuple[int, ctypes.c_void_p]] = []
        self._call("cuInit", 0)
        for ordinal in {device.local_hardware_id for device in devices}:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[ordinal] = context

    def lock(self, address: int, num_bytes: int) -> None:
        self._enter(next(iter(self._contexts)))
        try:
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), self.PORTABLE)
        except OSError:
            self._quick = self._slow  # copies from memory that isn't locked return late
            raise

    def unlock(self, address: int) -> None:
        self._enter(next(iter(self._contexts)))
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def lane(self, device: Any) -> tuple[int, ctypes.c_void_p]:
        lane = device.local_hardware_id, ctypes.c_void_p()
        self._enter(lane[0])
        self._call("cuStreamCreate", ctypes.byref(lane[1]), self.NON_BLOCKING)
        self._lanes.append(lane)
        return lane

    def copy(self, lane: tuple[int, ctypes.c_void_p], to: int, source: int, num_bytes: int) -> None:
        ordinal, stream = lane
        self._enter(ordinal)
        arguments = ctypes.c_uint64(to), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), stream
        _check("cuMemcpyHtoDAsync_v2", self._quick.cuMemcpyHtoDAsync_v2(*arguments))

    def wait(self, lane: tuple[int, ctypes.c_void_p]) -> None:
        ordinal, stream = lane
        self._enter(ordinal)
        status = self._quick.cuStreamQuery(stream)
        if status == self.NOT_READY:
            self._call("cuStreamSynchronize", stream)
        else:
            _check("cuStreamQuery", status)

    def close(self) -> None:
        for ordinal, stream in self._lanes:
            self._enter(ordinal)
            self._call("cuStreamDestroy_v2", stream)
        for ordinal in self._contexts:
            self._call("cuDevicePrimaryCtxRelease_v2", ordinal)
        self._lanes.clear()
        self._contexts.clear()

    def _enter(self, ordinal: int) -> None:
        _check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(self._contexts[ordinal]))

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._slow, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise OSError(f"{name} gave {status}")


def open_upload(devices: Sequence[Any]) -> Upload | None:
    """For this process's devices, or None where there is no CUDA driver to ask: then jax's own way does it."""
    if devices[0].platform != "gpu":
        return None
    try:
        return Upload(Cuda(devices))
    except OSError as error:
        logger.info("parameters go to the devices by jax.device_put: %s", error)
        return None
