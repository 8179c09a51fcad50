"""Headers that lie: always a named error, never a crash or a large allocation."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.safetensors_io import read_header, write_file

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F16", "shape": [], "data_offsets": [8, 10]},
}


def write(file: Path, header: Any, data: bytes = b"\0" * 10, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def test_good_header(tmp_path: Path) -> None:
    entries = read_header(write(tmp_path / "f", GOOD))
    assert {n: (e.dtype, e.shape, e.num_bytes) for n, e in entries.items()} == {
        "a": ("F32", (2,), 8),
        "b": ("F16", (), 2),
    }


def entry(**fields: Any) -> dict[str, Any]:
    return {"a": GOOD["a"], "b": GOOD["b"] | fields}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "isn't valid JSON"),
        (b"\xff\xfe", "isn't valid JSON"),
        (b"[" * 200_000, "isn't valid JSON"),
        (b'{"a":{},"a":{}}', "'a' appears twice"),
        ([], "is a JSON list"),
        ({"a": 1}, "needs dtype, shape and data_offsets"),
        (entry(dtype="F33"), "'F33' isn't known"),
        (entry(dtype=["F32"]), "isn't known"),
        (entry(shape=[-1]), "isn't a list of sizes"),
        (entry(shape=[True]), "isn't a list of sizes"),
        (entry(shape=[2.0]), "isn't a list of sizes"),
        (entry(shape=[2**62, 2**62]), "don't fit shape"),
        (entry(data_offsets=[8]), r"isn't \[begin, end\]"),
        (entry(data_offsets=[10, 8]), "don't fit"),
        (entry(data_offsets=[6, 8]), "overlaps"),
        (entry(data_offsets=[9, 11]), "hole"),
        (entry(shape=[2**40], data_offsets=[8, 8 + 2**41]), "is truncated"),
    ],
)
def test_bad_headers_are_named(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(write(tmp_path / "f", header))


def test_bad_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(write(tmp_path / "f", GOOD, length=2**63))
    with pytest.raises(CheckpointError, match="is truncated"):
        read_header(write(tmp_path / "f", GOOD, length=99_999_999))
    with pytest.raises(CheckpointError, match="3 bytes after its last tensor"):
        read_header(write(tmp_path / "f", GOOD, data=b"\0" * 13))
    with pytest.raises(CheckpointError, match="can't be read"):
        read_header(tmp_path / "absent")


def test_every_problem_of_a_header_is_listed(tmp_path: Path) -> None:
    bad = {"a": 1, "b": GOOD["b"] | {"dtype": "?"}, "c": GOOD["a"]}
    with pytest.raises(CheckpointError) as caught:
        read_header(write(tmp_path / "f", bad))
    assert len(caught.value.problems) == 2


def test_a_file_that_shrinks_after_the_check(tmp_path: Path) -> None:
    file = write(tmp_path / "f", GOOD)
    tensor = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="a ends after 6 of 8 bytes"):
        tensor.stored.read()
    file.unlink()
    with pytest.raises(CheckpointError, match="a can't be read"):
        tensor.stored.read()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is flipped in the header: an error of ours, or a header whose tensors all lie in the file."""
    raw = bytearray(write(tmp_path / "f", GOOD).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 11))] = data.draw(st.integers(0, 255))
    (tmp_path / "f").write_bytes(raw)
    try:
        entries = read_header(tmp_path / "f")
    except CheckpointError:
        return
    assert sum(e.num_bytes for e in entries.values()) <= 10
    assert all(e.offset_bytes + e.num_bytes <= len(raw) for e in entries.values())


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"x": rng.normal(size=(3, 5)).astype(np.float32), "y": rng.normal(size=7).astype(np.float16),
               "t": rng.normal(size=(4, 3)).astype(np.float32).T}  # fmt: skip
    write_file(tmp_path / "f", {n: (t.dtype, t.shape) for n, t in tensors.items()}, tensors.items())
    back = load_file(tmp_path / "f")
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)
    save_file(back, tmp_path / "g")
    assert {n: e.shape for n, e in read_header(tmp_path / "g").items()} == {n: t.shape for n, t in tensors.items()}
