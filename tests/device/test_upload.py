"""Parameters by way of page-locked buffers, with a driver that copies within the host: the same as by jax's own way."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import ModelConfig, startup
from jaxvllm.convert import CheckpointError, convert_checkpoint, files, hf, load_shards
from jaxvllm.convert import load as loading
from jaxvllm.convert.load import Parts
from jaxvllm.convert.spans import Span, spans
from jaxvllm.models.params import Table
from jaxvllm.models.registry import param_table
from jaxvllm.runtime import upload as uploads
from jaxvllm.runtime.mesh import make_mesh
from jaxvllm.runtime.upload import Upload, open_upload
from jaxvllm.runtime.weights import make_place
from tests.device.host_driver import Host
from tests.device.support import DATA, make_engine

NAMES = ["tied_head_dim_differs", "untied_sharded_index", "mqa_one_kv_head_odd_vocab", "qwen2_tied_bias"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the small checkpoints are larger than."""
    monkeypatch.setattr(uploads, "SMALL_BYTES", 1)
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    monkeypatch.setattr(loading, "SPAN_BYTES", 2500)
    monkeypatch.setattr(files, "SMALL_BYTES", 1)
    monkeypatch.setattr(files, "MIN_RUN_BYTES", 64)
    monkeypatch.setattr(hf, "MIN_RUN_BYTES", 64)


@pytest.fixture(scope="module", params=NAMES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model in both formats."""
    ours = tmp_path_factory.mktemp("ours") / "model"
    convert_checkpoint(DATA / request.param, ours)
    return [DATA / request.param, ours]


def span_of(data: bytes, stretches: list[tuple[int, int]]) -> Any:
    def read_into(memory: memoryview) -> None:
        memory[: len(data)] = data

    return SimpleNamespace(num_bytes=len(data), stretches=stretches, read_into=read_into)


def load(folder: Path, table: Table, mesh: jax.sharding.Mesh, dtype: str, upload: Upload | None) -> dict[str, Any]:
    return load_shards(folder, table, dtype=dtype, place=make_place(mesh, upload), keeps=True)


@pytest.mark.parametrize(
    ("tp", "dtype"), [(1, "float32"), (2, "bfloat16"), pytest.param(4, "float32", marks=pytest.mark.slow)]
)
def test_the_same_parameters_as_by_jaxs_own_way(folders: list[Path], tp: int, dtype: str, small: None) -> None:
    config = ModelConfig.from_dir(folders[0])
    table, mesh = param_table(config, tp=tp), make_mesh(tp)
    expected = load(folders[0], table, mesh, dtype, None)
    for folder in folders:
        driver = Host()
        with Upload(driver) as upload:
            placed = load(folder, table, mesh, dtype, upload)
        assert driver.closed == 1 and not driver.locked
        assert {device for device, _ in driver.lanes} <= set(mesh.devices.flat)
        assert folder is folders[0] or len({device for device, _ in driver.lanes}) == tp  # each its own
        streamed = driver.copied_bytes / sum(value.nbytes for value in placed.values())
        # ours can be cut anywhere; of Hugging Face's over several devices, nothing but what is whole on each
        assert streamed > 0.9 if tp == 1 else streamed > 0.2 if folder is not folders[0] else streamed < 0.1, streamed
        for path, value in expected.items():
            assert placed[path].sharding == value.sharding and placed[path].dtype == value.dtype
            for one, other in zip(placed[path].addressable_shards, value.addressable_shards, strict=True):
                assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), path


def test_memory_that_can_not_be_locked_is_used_as_it_is(small: None, caplog: pytest.LogCaptureFixture) -> None:
    folder, driver = DATA / NAMES[0], Host("lock")
    table, mesh = param_table(ModelConfig.from_dir(folder)), make_mesh(1)
    expected = load(folder, table, mesh, "float32", None)
    with caplog.at_level("INFO"), Upload(driver) as upload:
        placed = load(folder, table, mesh, "float32", upload)
    assert "memory can't be page-locked" in caplog.text and driver.closed == 1
    assert all(np.array_equal(placed[path], value) for path, value in expected.items())


READ = "the disk is gone"


def failing_load(driver: Host, monkeypatch: pytest.MonkeyPatch, read_fails: bool = False) -> None:
    folder = DATA / NAMES[0]

    def broken(self: Span, memory: memoryview) -> None:
        raise CheckpointError(folder, [READ])

    if read_fails:
        monkeypatch.setattr(Span, "read_into", broken)
    with Upload(driver) as upload:
        load(folder, param_table(ModelConfig.from_dir(folder)), make_mesh(1), "float32", upload)


@pytest.mark.parametrize("call", ["lane", "copy", "wait", "unlock", "close"])
@pytest.mark.parametrize("others", [(), ("unlock",), ("wait", "unlock", "close")])
def test_a_failing_call_is_raised_and_everything_is_given_back(
    call: str, others: tuple[str, ...], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Host(call, *others)
    with pytest.raises(OSError, match="gave 700") as caught:
        failing_load(driver, monkeypatch)
    assert call in str(caught.value) or call in ("unlock", "close")  # the first of them, not one of giving back
    assert driver.closed == 1 and driver.unlocks == uploads.NUM_BUFFERS
    assert not driver.locked or "unlock" in (call, *others)


@pytest.mark.parametrize("others", [(), ("unlock",), ("wait", "unlock", "close")])
def test_what_could_not_be_read_is_raised_whatever_fails_afterwards(
    others: tuple[str, ...], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Host(*others, at_exit=True)
    with pytest.raises(CheckpointError, match=READ):
        failing_load(driver, monkeypatch, read_fails=True)
    assert driver.closed == 1 and driver.unlocks == uploads.NUM_BUFFERS


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_last_copies_fail_or_are_interrupted(
    error: type[BaseException], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the end of the block waits for them."""
    driver = Host("wait", at_exit=True, error=error)
    with pytest.raises(error, match="wait gave 700"):
        failing_load(driver, monkeypatch)
    assert driver.closed == 1 and driver.unlocks == uploads.NUM_BUFFERS and not driver.locked


def test_a_lock_that_fails_otherwise_loses_no_buffer(small: None) -> None:
    driver = Host("lock", error=MemoryError)
    folder = DATA / NAMES[0]
    with Upload(driver) as upload:
        load(folder, param_table(ModelConfig.from_dir(folder)), make_mesh(1), "float32", upload)
    assert driver.copied_bytes and driver.closed == 1


def test_afterwards_nobody_gets_a_buffer_and_none_is_kept(small: None) -> None:
    driver, array = Host(), jax.numpy.zeros(8)
    with Upload(driver) as upload:
        upload.place(lambda index, send: True, (), (8,), np.dtype(np.float32), jax.devices()[0])
    span = span_of(bytes(32), [(0, 32)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"):
            upload._send(jax.devices()[0], array, span, 0)


def test_a_span_larger_than_a_buffer_is_refused(small: None) -> None:
    span = span_of(bytes(4100), [(0, 4100)])
    with Upload(Host()) as upload, pytest.raises(ValueError, match="4100 bytes doesn't fit into a buffer of 4096"):
        upload._send(jax.devices()[0], jax.numpy.zeros(2000), span, 0)


def test_stretches_of_a_span_come_where_they_belong(small: None) -> None:
    """A span's bytes lie one after another in its file, not in the part."""
    values = np.arange(6, dtype=np.float32)
    span = span_of(values.tobytes(), [(1004, 8), (1016, 12), (1000, 4)])
    with Upload(Host()) as upload:
        array = jax.block_until_ready(jax.numpy.zeros(8))
        upload._send(jax.devices()[0], array, span, 1000)
    assert np.asarray(array).tolist() == [5, 0, 1, 0, 2, 3, 4, 0]


def test_an_array_lives_until_its_bytes_have_come(small: None) -> None:
    span = span_of(np.ones(8, np.float32).tobytes(), [(0, 32)])
    with Upload(Host()) as upload:
        array = jax.block_until_ready(jax.numpy.zeros(8))
        upload._send(jax.devices()[0], array, span, 0)
        (busy,) = (buffer for buffer in upload._made if buffer.busy is not None)
        assert busy.target is array
    assert busy.target is None and np.asarray(array).tolist() == [1] * 8


def test_zeros_are_there_before_bytes_are_copied_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    ready = jax.block_until_ready
    monkeypatch.setattr(uploads.jax, "block_until_ready", lambda array: order.append("ready") or ready(array))
    with Upload(Host()) as upload:
        upload.place(lambda index, send: order.append("stream") or True, (), (1 << 20,), np.dtype(np.float32),
                     jax.devices()[0])  # fmt: skip
    assert order == ["ready", "stream"]


def test_what_several_devices_need_is_read_once_and_not_streamed(small: None) -> None:
    """Norms lie on both devices whole."""
    folder = DATA / NAMES[0]
    table = param_table(ModelConfig.from_dir(folder), tp=2)
    replicated = {path for path, info in table.items() if all(axis is None for axis in info.axes)}
    streamed: list[str] = []
    stream = Parts.stream

    def noted(self: Parts, *arguments: Any) -> bool:
        streamed.append(self.info.path)
        return stream(self, *arguments)

    with pytest.MonkeyPatch.context() as patched, Upload(Host()) as upload:
        patched.setattr(Parts, "stream", noted)
        load(folder, table, make_mesh(2), "float32", upload)
    assert replicated and streamed and not replicated & set(streamed)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bar_counts_every_byte_once(
    folders: list[Path], tp: int, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[list[int]] = []

    class Bar(nullcontext):
        def __init__(self, what: str, total: int) -> None:
            self.added: list[int] = []
            totals.append([total])
            totals.append(self.added)

        def __enter__(self) -> Bar:
            return self

        def add(self, num_bytes: int) -> None:
            self.added.append(num_bytes)

    monkeypatch.setattr(loading, "ByteBar", Bar)
    table = param_table(ModelConfig.from_dir(folders[0]), tp=tp)
    for folder in folders:
        with Upload(Host()) as upload:
            load(folder, table, make_mesh(tp), "float32", upload)
    for total, added in itertools.batched(totals, 2):
        assert sum(added) == total[0] and min(added) >= 0


def test_the_engine_loads_through_it(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Host()
    monkeypatch.setattr(startup, "open_upload", lambda devices: Upload(driver))
    with make_engine(DATA / NAMES[0], num_blocks=8, warmup=False):
        pass
    assert driver.copied_bytes > 0 and driver.closed == 1


def test_without_memory_for_buffers_nobody_waits_for_them(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(uploads.mmap, "mmap", refuse)
    folder, driver = DATA / NAMES[0], Host()
    table = param_table(ModelConfig.from_dir(folder))
    with pytest.raises(OSError, match="Cannot allocate memory"), Upload(driver) as upload:
        load(folder, table, make_mesh(1), "float32", upload)
    assert driver.closed == 1


def test_spans_fit_into_buffers() -> None:
    assert loading.SPAN_BYTES <= uploads.BUFFER_BYTES
    stored = files.Stored("x", np.dtype(np.float16), (2 * loading.SPAN_BYTES + 10,), Path("x"), 0)
    for dtype in (np.float16, np.float32, np.uint8):  # as it is, widened and narrowed
        out = np.empty(stored.shape, dtype)  # never touched
        made = list(spans(files.fill(stored, out), loading.SPAN_BYTES))
        assert max(max(span.num_bytes, 2 * span.size) for span in made) == loading.SPAN_BYTES
        assert sum(span.num_bytes for span in made) == out.nbytes
        assert [len(span.stretches) for span in made] == [1] * len(made)


def test_the_cpu_has_no_upload() -> None:
    assert open_upload(jax.devices()) is None


@pytest.mark.parametrize("where", ["read", "place"])
def test_a_failed_load_keeps_nothing_alive(where: str, small: None) -> None:
    """Without a pass of the garbage collector: a device may have no room for the next attempt beside it."""

    class Array:
        pass

    folder, seen = DATA / NAMES[1], []
    table = param_table(ModelConfig.from_dir(folder))

    def place(info: Any, read: Any) -> Any:
        array = Array()
        seen.append(weakref.ref(array))

        def send(span: Any, start: int) -> None:
            raise OSError("the disk is gone")

        read.stream(tuple(slice(0, n) for n in info.shape), send)
        if where == "place":
            raise OSError("the disk is gone")
        return array

    gc.collect()
    gc.disable()
    try:
        with suppress(OSError):
            load_shards(folder, table, dtype="float32", place=place)
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in seen) and time.monotonic() < deadline:
            time.sleep(0.01)  # threads of a pool end a little later
        assert seen and [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_one_parameter_at_a_time_is_prepared(small: None) -> None:
    first, go, entered = threading.Event(), threading.Event(), []

    def stream(index: Any, send: Any) -> bool:
        entered.append(index)
        first.set()
        return go.wait(10)

    def place(number: int) -> None:
        upload.place(stream, number, (8,), np.dtype(np.float32), jax.devices()[0])

    with Upload(Host()) as upload, ThreadPoolExecutor(3) as pool:
        placed = [pool.submit(place, number) for number in range(3)]
        assert first.wait(10)
        time.sleep(0.05)
        assert len(entered) == 1
        go.set()
        for future in placed:
            future.result(10)
    assert sorted(entered) == [0, 1, 2]


def test_buffers_begin_where_a_large_page_does(small: None) -> None:
    with Upload(Host()) as upload:
        upload._makers.shutdown()
        assert len(upload._made) == uploads.NUM_BUFFERS
        for buffer in upload._made:
            assert buffer.address % uploads.LARGE_PAGE_BYTES == 0 and len(buffer.data) == uploads.BUFFER_BYTES
            assert np.frombuffer(buffer.data, np.uint8).ctypes.data == buffer.address
