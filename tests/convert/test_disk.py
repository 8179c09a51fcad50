"""Disks that refuse: full, read-only, failing halfway. Real ones where this user may mount them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.config import ModelConfig
from jaxvllm.convert import (
    CheckpointError,
    convert_checkpoint,
    export_hf,
    open_checkpoint,
    verify_checkpoint,
    workfolder,
)
from jaxvllm.convert.workfolder import is_disk_error
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR, golden_copy, look_without_pauses

NAME = "untied_sharded_index"
SOURCE = GOLDEN_DIR / NAME
WEIGHTS = sum(file.stat().st_size for file in SOURCE.glob("*.safetensors"))  # 0.8 MB


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting isn't allowed here")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "size=2500k")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_disk / "other").write_bytes(bytes(2_000_000))

    def never(*args: object) -> None:
        raise AssertionError("nothing should be written")

    look_without_pauses(monkeypatch)
    monkeypatch.setattr("jaxvllm.convert.parts.save_part", never)
    with pytest.raises(CheckpointError, match=r"No space left on device \(1.9 MB are needed, 0.6 MB are free\)"):
        convert_checkpoint(SOURCE, small_disk / "ours")
    assert [p.name for p in small_disk.iterdir()] == ["other"]


# what orbax had begun ends after its event loop is closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("filled", [1_760_000, 2_000_000, 2_300_000])
def test_a_disk_that_fills_up_meanwhile(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: int
) -> None:
    """The disk's own error, from wherever it comes up: named, and nothing is left."""
    monkeypatch.setattr("jaxvllm.convert.workfolder._check_space", lambda *args: None)
    monkeypatch.setattr("jaxvllm.convert.build.PART_BYTES", 300_000)
    convert_checkpoint(SOURCE, tmp_path / "ours")
    (small_disk / "other").write_bytes(bytes(filled))
    for write, source in ((convert_checkpoint, SOURCE), (export_hf, tmp_path / "ours")):
        with pytest.raises(CheckpointError, match=r"can't be written: No space left.*nothing is left of it"):
            write(source, small_disk / "target")
        assert [p.name for p in small_disk.iterdir()] == ["other"]
    (small_disk / "other").unlink()
    convert_checkpoint(SOURCE, small_disk / "target")
    verify_checkpoint(small_disk / "target")


def test_a_read_only_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "ro,size=1m")
    try:
        with pytest.raises(CheckpointError, match=r"can't be written: Read-only file system.*nothing is left of it"):
            convert_checkpoint(SOURCE, folder / "ours")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_whatever_the_disk_says_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Without mounts: the error in the first write, in a part (as tensorstore words it), and at the end."""
    message = f'INTERNAL: Error writing "x" [OS error {number}: {errno.errorcode[number]} {os.strerror(number)}]'

    def os_error(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    def library_error(*args: object) -> None:
        raise ValueError(message)

    places = (
        ("jaxvllm.convert.workfolder.Path.mkdir", os_error),
        ("jaxvllm.convert.parts.save_part", library_error),
        ("jaxvllm.convert.build.copy_beside", os_error),
        ("jaxvllm.convert.workfolder._take_place", os_error),
    )
    look_without_pauses(monkeypatch)
    for place, failing in places:
        with monkeypatch.context() as patched:
            patched.setattr(place, failing)
            with pytest.raises(CheckpointError, match=f"can't be written: {os.strerror(number)}"):
                convert_checkpoint(SOURCE, tmp_path / "ours")
        assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_what_they_are() -> None:
    assert is_disk_error(ValueError("shapes differ")) is None
    caused = RuntimeError("writing failed")
    caused.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    found = is_disk_error(caused)
    assert found is not None and found.errno == errno.ENOSPC


def test_files_that_can_t_be_removed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("jaxvllm.convert.parts.save_part", failing)
    monkeypatch.setattr("jaxvllm.convert.workfolder.shutil.rmtree", lambda *args, **options: None)
    look_without_pauses(monkeypatch)
    with pytest.raises(CheckpointError, match=r"partial files are left in .*ours\.partial: remove them"):
        convert_checkpoint(SOURCE, tmp_path / "ours")


MEASURE = """
import resource, sys, threading, time
from jaxvllm.convert import convert_checkpoint, export_hf
import jax, orbax.checkpoint, tensorstore
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
peak, running = 0, True
def watch():
    global peak
    while running:
        peak = max(peak, rss())
        time.sleep(0.002)
convert_checkpoint(sys.argv[1], sys.argv[3] + "/warm")
before = rss()
thread = threading.Thread(target=watch); thread.start()
(export_hf if sys.argv[4] == "hf" else convert_checkpoint)(sys.argv[2], sys.argv[3] + "/made")
running = False; thread.join()
print(peak - before)
"""


def big_model(folder: Path, *, layers: int) -> int:
    """A float32 model in shards of two tensors; the bytes of its largest tensor."""
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers, "vocab_size": 24000,
              "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "layer_types": None}  # fmt: skip
    golden_copy("tied_head_dim_differs", folder, config=fields)
    sources = [s for i in param_table(ModelConfig.from_dir(folder)).values() for s in i.sources]
    (folder / "model.safetensors").unlink()
    block = np.random.default_rng(0).normal(size=24000 * 2048).astype(np.float32)
    weight_map = {}
    for n in range(0, len(sources), 16):
        file = f"model-{n:05d}.safetensors"
        save_file({s.name: block[: np.prod(s.shape)].reshape(s.shape) for s in sources[n : n + 16]}, folder / file)
        weight_map |= {s.name: file for s in sources[n : n + 16]}
    import json

    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(int(np.prod(s.shape)) for s in sources) * 4


@pytest.mark.parametrize("layers", [pytest.param(7, marks=pytest.mark.slow)])
def test_memory_of_a_model_of_2_gb(tmp_path: Path, layers: int) -> None:
    """Peak resident memory above what was there before: the largest tensor and 1 GB at most, both ways."""
    import sys

    largest = big_model(tmp_path / "src", layers=layers)
    assert sum(f.stat().st_size for f in (tmp_path / "src").glob("*.safetensors")) > 1.9e9
    for to, source in (("jaxvllm", "src"), ("hf", "ours")):
        (tmp_path / to).mkdir()
        command = [sys.executable, "-c", MEASURE, str(SOURCE), str(tmp_path / source), str(tmp_path / to), to]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
                              env=os.environ | {"JAX_PLATFORMS": "cpu"})  # fmt: skip
        peak = int(done.stdout.split()[-1])
        print(f"to {to}: peak {peak / 1e9:.2f} GB above the start; largest tensor {largest / 1e9:.2f} GB")
        assert peak < largest + 1e9
        if to == "jaxvllm":
            verify_checkpoint(tmp_path / to / "made")  # memory was used again: nothing was overwritten too early
        shutil.move(tmp_path / to / "made", tmp_path / ("ours" if to == "jaxvllm" else "back"))
    for info in param_table(ModelConfig.from_dir(tmp_path / "src")).values():
        with open_checkpoint(tmp_path / "src") as one, open_checkpoint(tmp_path / "back") as other:
            assert np.array_equal(one.read(info).view(np.uint32), other.read(info).view(np.uint32)), info.path


@pytest.mark.parametrize(("every", "absences", "gone"), [(3, 6, True), (5, 6, True), (6, 6, False), (1, 1, False)])
def test_a_folder_is_removed_also_under_writes_that_were_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, absences: int, gone: bool
) -> None:
    """They make it again five times, each time after `every` looks: fewer than the looks that it has to stay away."""
    root = tmp_path / "target.partial"
    root.mkdir()
    looks = 0

    def write(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks % every == 0 and looks <= 5 * every:
            root.mkdir(exist_ok=True)
            (root / str(looks)).write_text("late")

    monkeypatch.setattr(workfolder.time, "sleep", write)
    workfolder._remove(root, absences)
    assert not root.exists() and (looks == 5 * every + absences - 1) == gone


def test_a_folder_that_comes_back_for_ever_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "target.partial"
    root.mkdir()
    monkeypatch.setattr(workfolder.time, "sleep", lambda _: root.mkdir())
    workfolder._remove(root, absences=2)
    assert root.exists()
