"""The few calls of the CUDA driver that bring parameters to GPUs (`upload`), by ctypes: jax has none of them.

Owns: their names, arguments and what their status means. Must not know: what is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

type Lane = tuple[int, ctypes.c_void_p]  # a device's ordinal, a stream


class Driver(Protocol):
    """The calls of CUDA that this needs; addresses are int. A lane: copies to one device, one after another."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Keeps host memory where it is, for the copies of all devices."""
        ...

    def unlock(self, address: int) -> None: ...

    def lane(self, device: Any) -> Any:
        """For threads that do nothing else with a GPU: they keep what the driver sets for them."""
        ...

    def copy(self, lane: Any, to: int, source: int, num_bytes: int) -> None:
        """From locked host memory to the lane's device; returns before it is there. For such threads, too."""
        ...

    def wait(self, lane: Any) -> None:
        """Returns when everything is there."""
        ...

    def close(self) -> None: ...


class Cuda:
    """The CUDA driver, in jax's own (primary) contexts. Raises OSError where there is none.

    Calls that return at once keep the interpreter's lock. Letting go of it and getting it back among sixteen threads
    takes 0.1 ms, and all take their turns: four times a piece, that was as long as reading.
    """

    PORTABLE = 1  # locked for all contexts
    NON_BLOCKING = 1  # doesn't wait for the default stream
    NOT_READY, ALREADY_LOCKED = 600, 712

    def __init__(self, devices: Sequence[Any]) -> None:
        self._slow = ctypes.CDLL("libcuda.so.1")  # others run meanwhile
        self._quick = ctypes.PyDLL("libcuda.so.1")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lanes: list[Lane] = []
        self._thread = threading.local()  # entered: the ordinal of a copying thread's context
        try:
            self._call("cuInit", 0)
            for ordinal in {device.local_hardware_id for device in devices}:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), ordinal)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[ordinal] = context
        except OSError:
            self.close()
            raise

    def lock(self, address: int, num_bytes: int) -> None:
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), self.PORTABLE
        with self._as_it_was():
            self._enter(next(iter(self._contexts)))
            try:
                status = self._slow.cuMemHostRegister_v2(*arguments)
                if status == self.ALREADY_LOCKED:  # by somebody before us who couldn't give it back: other pages
                    self._call("cuMemHostUnregister", arguments[0])
                    status = self._slow.cuMemHostRegister_v2(*arguments)
                _check("cuMemHostRegister_v2", status)
            except OSError:
                self._quick = self._slow  # copies from memory that isn't locked return late
                raise

    def unlock(self, address: int) -> None:
        with self._as_it_was():
            self._enter(next(iter(self._contexts)))
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def lane(self, device: Any) -> Lane:
        lane = device.local_hardware_id, ctypes.c_void_p()
        self._stay(lane[0])
        self._call("cuStreamCreate", ctypes.byref(lane[1]), self.NON_BLOCKING)
        self._lanes.append(lane)
        return lane

    def copy(self, lane: Lane, to: int, source: int, num_bytes: int) -> None:
        ordinal, stream = lane
        self._stay(ordinal)
        arguments = ctypes.c_uint64(to), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), stream
        _check("cuMemcpyHtoDAsync_v2", self._quick.cuMemcpyHtoDAsync_v2(*arguments))

    def wait(self, lane: Lane) -> None:
        if hasattr(self._thread, "entered"):
            self._stay(lane[0])
            self._await(lane[1])
        else:  # somebody else's thread
            with self._as_it_was():
                self._enter(lane[0])
                self._await(lane[1])

    def close(self) -> None:
        """Gives back all that it can; then raises the first failure."""
        failed: list[OSError] = []
        with self._as_it_was():
            for ordinal, stream in self._lanes:
                try:
                    self._enter(ordinal)
                    self._call("cuStreamDestroy_v2", stream)
                except OSError as error:
                    failed.append(error)
        for ordinal in self._contexts:
            try:
                self._call("cuDevicePrimaryCtxRelease_v2", ordinal)
            except OSError as error:
                failed.append(error)
        self._lanes.clear()
        self._contexts.clear()
        if failed:
            raise failed[0]

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Leaves this thread with the context that it had: it may be the caller's, who has other libraries."""
        before = ctypes.c_void_p()
        known = not self._quick.cuCtxGetCurrent(ctypes.byref(before))
        try:
            yield
        finally:
            if known:
                self._quick.cuCtxSetCurrent(before)

    def _await(self, stream: ctypes.c_void_p) -> None:
        status = self._quick.cuStreamQuery(stream)
        if status == self.NOT_READY:
            self._call("cuStreamSynchronize", stream)
        else:
            _check("cuStreamQuery", status)

    def _stay(self, ordinal: int) -> None:
        """Enters a context unless this thread has stayed in it: a call less, of sixteen threads for each copy."""
        if getattr(self._thread, "entered", None) != ordinal:
            self._enter(ordinal)
            self._thread.entered = ordinal

    def _enter(self, ordinal: int) -> None:
        _check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(self._contexts[ordinal]))

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._slow, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise OSError(f"{name} gave {status}")
