"""The safetensors file format: headers checked before anything is read, tensors read one at a time.

A file is: 8 bytes, the header's length as a little-endian uint64; the header, one JSON object that maps each
name to {"dtype", "shape", "data_offsets": [begin, end]}; then the data, which the offsets cover without holes
or overlaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.files import Stored
from jaxvllm.convert.tables import FLOAT_DTYPES, SAFETENSORS_NAMES

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Bits an element; what isn't in FLOAT_DTYPES is known here only so that it can be refused by name.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
         "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
         "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. dtype: the format's name ("BF16"). offset_bytes: from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int
    num_bytes: int

    @property
    def stored(self) -> Stored:
        """The same as bytes to read; its dtype must be one of FLOAT_DTYPES."""
        return Stored(self.name, FLOAT_DTYPES[self.dtype], self.shape, self.file, self.offset_bytes)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """A file's tensors, in the order of their data. Raises CheckpointError: truncated, malformed."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            entries = _parse_header(file, stream, size)
    except OSError as error:
        raise CheckpointError(file, [f"can't be read: {error.strerror}"]) from error
    return {entry.name: entry for entry in entries}


def _parse_header(file: Path, stream: BinaryIO, size: int) -> list[TensorEntry]:
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise CheckpointError(file, [f"is truncated: {size} bytes, a safetensors file has at least 8"])
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(file, [f"header length {length} is above {MAX_HEADER_BYTES}: not a safetensors file"])
    if 8 + length > size:
        raise CheckpointError(file, [f"is truncated: its header ends at byte {8 + length}, the file has {size}"])
    try:
        header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, [f"header isn't valid JSON: {error}"]) from error
    if not isinstance(header, dict):
        raise CheckpointError(file, [f"header is a JSON {type(header).__name__}, not an object"])
    header.pop("__metadata__", None)
    start = 8 + length
    entries, problems = [], []
    for name, fields in header.items():
        try:
            entries.append(_entry(file, name, fields, start))
        except ValueError as error:
            problems.append(f"tensor {name!r}: {error}")
    if not problems:
        entries.sort(key=lambda e: (e.offset_bytes, e.num_bytes))
        problems = _layout_problems(entries, start, size)
    if problems:
        raise CheckpointError(file, problems)
    return entries


def _entry(file: Path, name: str, fields: Any, start: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError("its entry needs dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"dtype {dtype!r} isn't known")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise ValueError(f"shape {shape!r} isn't a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise ValueError(f"data_offsets {offsets!r} isn't [begin, end]")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"data_offsets {offsets} don't fit shape {shape} of {dtype}")
    return TensorEntry(name, dtype, tuple(shape), file, start + begin, end - begin)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _layout_problems(entries: list[TensorEntry], start: int, size: int) -> list[str]:
    at = start
    for entry in entries:
        if entry.offset_bytes != at:
            kind = "overlaps another's data" if entry.offset_bytes < at else "leaves a hole before it"
            return [f"tensor {entry.name!r} {kind}: it begins at byte {entry.offset_bytes}, expected {at}"]
        at += entry.num_bytes
    if at > size:
        return [f"is truncated: its tensors end at byte {at}, the file has {size}"]
    return [f"has {size - at} bytes after its last tensor"] if at < size else []


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's object_pairs_hook that refuses a key given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} appears twice")
    return result


def read_unique(file: Path) -> Any:
    """A JSON file of at most 100 MB in which no key appears twice. Raises ValueError, OSError or RecursionError."""
    size = file.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"it has {size} bytes, more than {MAX_HEADER_BYTES}")
    return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)


def write_file(
    file: Path,
    shapes: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes ``tensors`` one after another, as they come, with the names and order of ``shapes``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this entry
    at = 0
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned data
    with file.open("wb", buffering=0) as stream:
        os.posix_fallocate(stream.fileno(), 0, 8 + len(text) + at)  # a full disk says so now
        _write_all(stream, struct.pack("<Q", len(text)) + text)
        for (name, tensor), (expected, (dtype, shape)) in zip(tensors, shapes.items(), strict=True):
            assert (name, tensor.dtype, tensor.shape) == (expected, dtype, shape)
            _write_all(stream, np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        os.fsync(stream.fileno())


def _write_all(stream: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[stream.write(view) :]
