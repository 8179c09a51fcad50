"""Threads that read: what of theirs is over, and which error is raised, when one fails; descriptors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import ModelConfig
from jaxvllm.convert import CheckpointError, convert_checkpoint, files, verify_checkpoint
from jaxvllm.convert.files import ParallelReader, Stored
from jaxvllm.convert.hf import HFReader
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR

FOLDER = GOLDEN_DIR / "untied_sharded_index"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nobody_reads_any_more_when_a_failure_is_raised() -> None:
    """The memory of the others may be another parameter's by then."""
    started, ended = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        time.sleep(0.2)
        ended.set()

    def broken() -> None:
        assert started.wait(10)
        raise OSError("the disk is gone")

    with ParallelReader(2) as reader:
        with pytest.raises(OSError, match="the disk is gone"):
            reader.run([broken, slow, *[partial(time.sleep, 0)] * 20], files.SMALL_BYTES)
        assert ended.is_set()


def test_verify_accuses_only_what_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late reads of the failed parameter don't end in the next one's memory."""
    folder = tmp_path / "model"
    convert_checkpoint(FOLDER, folder)
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    monkeypatch.setattr(files, "SMALL_BYTES", 1)
    monkeypatch.setattr("jaxvllm.convert.memory.SMALL_BYTES", 1)
    read_into, lock, seen = Stored.read_into, threading.Lock(), 0

    def read(self: Stored, out: np.ndarray, first: int = 0) -> None:
        nonlocal seen
        if self.name != "embed":
            return read_into(self, out, first)
        with lock:
            seen += 1
            number = seen
        if number == 1:
            raise CheckpointError(self.file, ["embed can't be read"])
        time.sleep(0.02)
        return read_into(self, out, first)

    monkeypatch.setattr(Stored, "read_into", read)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder)
    assert seen > 1 and len(caught.value.problems) == 1 and "embed can't be read" in caught.value.problems[0]


@pytest.mark.parametrize("first", [0, 3, 7])
def test_the_first_failure_is_raised_not_those_that_it_brings(first: int) -> None:
    failed, begun = threading.Event(), threading.Barrier(8)

    def job(number: int) -> None:
        begun.wait(10)
        if number != first:
            assert failed.wait(10)
            time.sleep(0.01)
            raise OSError("the context is dead")
        try:
            raise OSError("the cause")
        finally:
            failed.set()

    with ParallelReader(8) as reader:
        reader.start([partial(job, number) for number in range(8)])
        time.sleep(0.05)
        with pytest.raises(OSError, match="the cause"):
            reader.finish()


def test_what_was_started_is_over_when_the_reader_is() -> None:
    done: list[int] = []

    def job(number: int) -> None:
        time.sleep(0.005)
        done.append(number)

    with ParallelReader(3) as reader:
        reader.start([partial(job, number) for number in range(30)])
        reader.finish()
        assert sorted(done) == list(range(30))
        reader.start([partial(job, number) for number in range(30)])
    left = len(done)
    time.sleep(0.05)
    assert len(done) == left < 60


def test_a_thread_has_one_file_open_and_in_the_end_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may have more files than a process may open."""
    monkeypatch.setattr(files, "SMALL_BYTES", 1)
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    before, most = open_files(), 0
    read_into = Stored.read_into

    def read(self: Stored, out: np.ndarray, first: int = 0) -> None:
        nonlocal most
        read_into(self, out, first)
        most = max(most, open_files())

    monkeypatch.setattr(Stored, "read_into", read)
    with HFReader(FOLDER, 2) as reader:
        assert len(reader.files) > 2
        for info in param_table(ModelConfig.from_dir(FOLDER)).values():
            reader.read(info)
    assert before < most <= before + 3  # and the folder that was looked into for the number
    assert open_files() == before


def test_jobs_are_started_no_faster_than_they_are_done() -> None:
    """Whoever prepares them would take Python's lock from those who read."""
    go, started, begun = threading.Semaphore(0), 0, threading.Semaphore(0)

    def job() -> None:
        begun.release()
        assert go.acquire(timeout=10)

    def prepare() -> Iterator[Callable[[], None]]:
        nonlocal started
        for _ in range(20):
            started += 1
            yield job

    with ParallelReader(3) as reader:
        thread = threading.Thread(target=lambda: reader.start(prepare()))
        thread.start()
        for done in range(14):
            assert begun.acquire(timeout=10)
            assert started <= done + 1 + 2 * 3 + 1  # begun, three more that run, three that wait, one in hand
            if done >= 2:
                go.release()
        go.release(8)
        thread.join(10)
        reader.finish()
    assert started == 20


@pytest.mark.parametrize("end", ["stop", "failure"])
def test_nobody_waits_to_start_what_will_not_be_done(end: str) -> None:
    go, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def job() -> None:
        assert go.wait(10)
        if end == "failure":
            raise OSError("the disk is gone")

    with ParallelReader(2) as reader:

        def start() -> None:
            try:
                reader.start([job] * 1000)
            except OSError as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=start).start()
        assert not ended.wait(0.1)
        if end == "stop":
            reader.stop()
            assert ended.wait(10)
            reader.stop()
            reader.start([job])  # is nobody's any more
        go.set()
        assert ended.wait(10)
        assert [str(error) for error in errors] == (["the disk is gone"] if end == "failure" else [])
        for _ in range(10 if end == "failure" else 0):  # more often than there are threads
            with pytest.raises(OSError, match="the disk is gone"):
                reader.start([job])
        if end == "failure":
            with pytest.raises(OSError, match="the disk is gone"):
                reader.finish()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("lay_out", ["as it is", "every second", "transposed", "backwards"])
def test_whatever_an_array_looks_like_its_own_memory_is_filled(shape: tuple[int, ...], lay_out: str, tmp_path: Path
                                                              ) -> None:  # fmt: skip
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    (tmp_path / "x").write_bytes(values.tobytes())
    out = np.full(shape, -1, np.int32)
    if lay_out == "every second" and shape:
        out = np.full((*shape[:-1], 2 * shape[-1]), -1, np.int32)[..., ::2]
    elif lay_out == "transposed":
        out = np.full(shape[::-1], -1, np.int32).T
    elif lay_out == "backwards" and shape:
        out = out[..., ::-1]
    stored = Stored("x", values.dtype, shape, tmp_path / "x", 0)
    for piece in files.fill(stored, out):
        piece()
    np.testing.assert_array_equal(out, values)
    sliced = files.fill_slice(stored, tuple(slice(0, n) for n in shape), out)
    if lay_out == "as it is":
        out[...] = -1
        for piece in sliced or ():
            piece()
        np.testing.assert_array_equal(out, values)


def test_nothing_more_is_done_after_a_failure() -> None:
    done: list[int] = []
    go, later = threading.Event(), threading.Event()

    def bad() -> None:
        assert go.wait(10)
        raise OSError("the disk is gone")

    def work() -> None:
        done.append(1)
        later.set()

    with ParallelReader(1) as reader:
        reader.start([bad, work])
        go.set()
        assert not later.wait(0.2)
        with pytest.raises(OSError, match="the disk is gone"):
            reader.finish()
    assert done == []


def test_who_waits_to_start_is_let_go_when_the_reader_is_closed() -> None:
    go, ended = threading.Event(), threading.Event()
    reader = ParallelReader(1)

    def job() -> None:
        assert go.wait(10)

    def start() -> None:
        reader.start([job] * 10)
        ended.set()

    threading.Thread(target=start, daemon=True).start()
    assert not ended.wait(0.1)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    try:
        assert ended.wait(10)
    finally:
        go.set()
    closing.join(10)
    assert not closing.is_alive()


def test_a_read_that_brings_less_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of more than 2 GiB does."""
    values = np.random.default_rng(0).integers(0, 255, 10_000, dtype=np.uint8)
    values.tofile(tmp_path / "x")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:777]], at))
    np.testing.assert_array_equal(Stored("x", values.dtype, values.shape, tmp_path / "x", 0).read(), values)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_pieces_are_small_before_and_after_a_cast(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    stored = Stored("x", np.dtype(np.float16), (3000,), Path("x"), 0)
    pieces = list(files.cut(files.fill(stored, np.empty(3000, dtype))))
    assert max(max(piece.out.nbytes, piece.out.size * 2) for piece in pieces) == 1000
    assert [piece.first for piece in pieces] == list(range(0, 3000, pieces[0].out.size))
