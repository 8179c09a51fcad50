"""What the CUDA driver is asked, by a library that only notes it; the driver itself: tests/gpu/test_upload.py."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from jaxvllm.runtime.cuda import Cuda, Lane


class Library:
    """Notes the driver's calls; those in `status` give that, in turn, where it is a list."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status: dict[str, int | list[int]] = {}
        self.current = 5  # the caller's context

    def called(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append(name)
        status = self.status.get(name, 0)
        if isinstance(status, list):
            status = status.pop(0) if status else 0
        if name == "cuCtxSetCurrent" and not status:
            self.current = arguments[0].value or 0
        if name == "cuCtxGetCurrent":
            arguments[0]._obj.value = self.current
        if name == "cuDevicePrimaryCtxRetain" and not status:
            arguments[0]._obj.value = 77
        return status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()

    def opened(kind: str) -> Any:
        class Calls:
            def __getattr__(self, name: str) -> Any:
                return lambda *arguments: made.called(name, arguments)

        calls = Calls()
        calls.__dict__["kind"] = kind
        return calls

    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened("slow"))
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: opened("quick"))
    return made


DEVICE = SimpleNamespace(local_hardware_id=0)


def in_a_thread(action: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(action).result()


def test_a_reading_thread_goes_from_one_devices_context_to_anothers(library: Library) -> None:
    cuda, other = Cuda([DEVICE]), SimpleNamespace(local_hardware_id=1)
    cuda._contexts[1] = ctypes.c_void_p(88)

    def read() -> None:
        first, second = cuda.lane(DEVICE), cuda.lane(other)
        for lane, context in ((first, 77), (second, 88), (second, 88), (first, 77)):
            cuda.copy(lane, 1, 4096, 10)
            assert library.current == context
            cuda.wait(first)
            assert library.current == 77

    in_a_thread(read)


def test_what_cuda_is_asked(library: Library) -> None:
    """Every stream, lock and context is given back, and the caller's thread has the context that it had."""
    cuda = Cuda([DEVICE, DEVICE])
    cuda.lock(4096, 4096)
    assert library.current == 5
    lanes: list[Lane] = []

    def read() -> None:
        lanes.append(cuda.lane(DEVICE))
        cuda.copy(lanes[0], 1, 4096, 10)
        assert library.current == 77  # a reading thread's own
        entered = library.calls.count("cuCtxSetCurrent")
        cuda.wait(lanes[0])
        cuda.copy(lanes[0], 1, 4096, 10)
        assert library.calls.count("cuCtxSetCurrent") == entered  # it stays there
        library.current = 5

    in_a_thread(read)
    library.status["cuStreamQuery"] = Cuda.NOT_READY
    cuda.wait(lanes[0])
    assert library.current == 5
    cuda.unlock(4096)
    cuda.close()
    assert library.current == 5
    seen = Counter(call for call in library.calls if not call.startswith("cuCtx"))
    assert seen == {"cuInit": 1, "cuDeviceGet": 1, "cuDevicePrimaryCtxRetain": 1, "cuMemHostRegister_v2": 1,
                    "cuStreamCreate": 1, "cuMemcpyHtoDAsync_v2": 2, "cuStreamQuery": 2, "cuStreamSynchronize": 1,
                    "cuMemHostUnregister": 1, "cuStreamDestroy_v2": 1, "cuDevicePrimaryCtxRelease_v2": 1}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["cuMemcpyHtoDAsync_v2", "cuStreamQuery", "cuStreamCreate", "cuMemHostRegister_v2", "cuMemHostUnregister",
             "cuCtxSetCurrent"]
)  # fmt: skip
def test_a_status_is_an_error_with_the_calls_name(name: str, library: Library) -> None:
    cuda = Cuda([DEVICE])
    lane = cuda.lane(DEVICE)
    library.status[name] = 700

    def everything() -> None:
        cuda.lock(4096, 4096)
        cuda.lane(DEVICE)
        cuda.copy(lane, 1, 4096, 10)
        cuda.wait(lane)
        cuda.unlock(4096)

    with pytest.raises(OSError, match=f"{name} gave 700"):
        everything()


def test_copies_from_memory_that_is_not_locked_let_others_run(library: Library) -> None:
    cuda = Cuda([DEVICE])
    assert cuda._quick.kind == "quick"
    library.status["cuMemHostRegister_v2"] = 2
    with pytest.raises(OSError, match="cuMemHostRegister_v2 gave 2"):
        cuda.lock(4096, 4096)
    assert cuda._quick.kind == "slow"


def test_memory_that_somebody_left_locked_is_locked_anew(library: Library) -> None:
    """The driver would copy the pages that were there before."""
    cuda = Cuda([DEVICE])
    library.status["cuMemHostRegister_v2"] = [Cuda.ALREADY_LOCKED]
    cuda.lock(4096, 4096)
    assert [call for call in library.calls if "MemHost" in call] == [
        "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemHostRegister_v2"
    ]  # fmt: skip


def test_contexts_are_given_back_when_another_can_not_be_had(library: Library) -> None:
    library.status["cuDevicePrimaryCtxRetain"] = [0, 2]
    with pytest.raises(OSError, match="cuDevicePrimaryCtxRetain gave 2"):
        Cuda([DEVICE, SimpleNamespace(local_hardware_id=1)])
    assert library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_closing_gives_back_what_it_can(library: Library) -> None:
    cuda = Cuda([DEVICE])
    for _ in range(2):
        cuda.lane(DEVICE)
    library.status["cuStreamDestroy_v2"] = [700]
    with pytest.raises(OSError, match="cuStreamDestroy_v2 gave 700"):
        cuda.close()
    assert library.calls.count("cuStreamDestroy_v2") == 2 and library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1
