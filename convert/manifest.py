"""manifest.json: what a folder of ours holds, and where each parameter's bytes lie in it.

    format, format_version, tool_version
    source    {file: bytes} that was converted
    params    {path: {shape, dtype, xxh3, from: source files, part, and either file + offset or value}}
    files     {file under params/: {bytes, xxh3}}; no xxh3 where parameters cover it
    beside    {config.json, tokenizer files, ...: xxh3}

``value`` is a parameter of at most 1024 bytes itself, in base64: orbax keeps those inside its index. Checksums are
XXH3 (128 bits) of the stored bytes. Owns: reading this file, distrusting all of it. Must not know: orbax.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.files import Stored
from jaxvllm.convert.safetensors_io import read_unique
from jaxvllm.convert.tables import FLOAT_DTYPES, host_dtype

MANIFEST, FORMAT, FORMAT_VERSION, PARAMS = "manifest.json", "jaxvllm", 2, "params"
_DTYPES = {dtype.name for dtype in FLOAT_DTYPES.values()}


@dataclass(frozen=True, slots=True)
class StoredParam:
    """A parameter's line: numpy dtype name; the folder under params/; its bytes' place (file None: in ``value``)."""

    shape: tuple[int, ...]
    dtype: str
    xxh3: str
    part: str
    file: str | None = None
    offset: int = 0
    value: bytes = b""
    sources: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * host_dtype(self.dtype).itemsize

    def at(self, folder: Path, path: str) -> Stored:
        """The bytes to read; only where ``file`` is given."""
        assert self.file is not None
        return Stored(path, host_dtype(self.dtype), self.shape, folder / self.file, self.offset)

    def inline(self) -> np.ndarray:
        """The parameter itself, where its bytes are in the manifest."""
        return np.frombuffer(self.value, host_dtype(self.dtype)).reshape(self.shape).copy()

    def to_json(self) -> dict[str, Any]:
        head = {"shape": list(self.shape), "dtype": self.dtype, "xxh3": self.xxh3, "from": list(self.sources)}
        if self.file is None:
            return head | {"part": self.part, "value": base64.b64encode(self.value).decode()}
        return head | {"part": self.part, "file": self.file, "offset": self.offset}


@dataclass(frozen=True, slots=True)
class Manifest:
    """params by path; files: {name: (bytes, xxh3 or None)}; beside: {name: xxh3}."""

    params: dict[str, StoredParam]
    files: dict[str, tuple[int, str | None]]
    beside: dict[str, str]


def manifest_text(fields: Mapping[str, Any]) -> str:
    """JSON with one line for each parameter and file, so that two manifests can be compared by eye."""
    lines = []
    for key, value in fields.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            text = "{\n  " + ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_manifest(path: Path) -> Manifest:
    """manifest.json, of the format version that this version reads. Raises CheckpointError listing what is wrong."""
    try:
        fields = read_unique(path / MANIFEST)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"{MANIFEST} can't be read as JSON: {error}"]) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CheckpointError(path, [f'{MANIFEST} isn\'t one of ours: it has no "format": "{FORMAT}"'])
    version = fields.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CheckpointError(
            path, [f"format_version={version!r} isn't readable here, {FORMAT_VERSION} is: convert the model again"]
        )
    files = parse_files(path, fields.get("files"))
    beside = fields.get("beside")
    if not isinstance(beside, dict) or not all(_plain(n) and isinstance(h, str) for n, h in beside.items()):
        raise CheckpointError(path, [f"{MANIFEST} has no beside with checksums of the other files"])
    return Manifest(parse_params(path, fields.get("params"), files), files, beside)


def parse_params(path: Path, params: Any, files: Mapping[str, tuple[int, str | None]]) -> dict[str, StoredParam]:
    """The params of a manifest or a journal; each must lie inside one of ``files``."""
    if not isinstance(params, dict):
        raise CheckpointError(path, [f"{MANIFEST} has no params"])
    stored, problems = {}, []
    for name, fields in params.items():
        param = _parse_param(fields)
        if param is None:
            problems.append(
                f"{MANIFEST}: parameter {name!r} needs shape, dtype ({', '.join(sorted(_DTYPES))}), xxh3, part, and "
                "file with offset or value"
            )
        elif param.file is None and len(param.value) != param.num_bytes:
            problems.append(f"{MANIFEST}: parameter {name!r} has {len(param.value)} bytes, expected {param.num_bytes}")
        elif param.file is not None and param.file not in files:
            problems.append(f"{MANIFEST}: parameter {name!r} lies in {param.file!r}, which isn't among its files")
        elif param.file is not None and param.offset + param.num_bytes > files[param.file][0]:
            problems.append(
                f"{MANIFEST}: parameter {name!r} ends at byte {param.offset + param.num_bytes} of {param.file}, which "
                f"has {files[param.file][0]}"
            )
        else:
            stored[name] = param
    problems = problems or _overlaps(stored)
    if problems:
        raise CheckpointError(path, problems)
    return stored


def _parse_param(fields: Any) -> StoredParam | None:
    match fields:
        case {"shape": [*shape], "dtype": str(dtype), "xxh3": str(xxh3), "from": [*sources], "part": str(part)} if (
            all(_is_size(n) for n in shape) and dtype in _DTYPES and _plain(part) and len(shape) <= 8
            and all(isinstance(source, str) for source in sources)
        ):  # fmt: skip
            common = (tuple(shape), dtype, xxh3, part)
        case _:
            return None
    match fields:
        case {"file": str(file), "offset": int(offset)} if _is_size(offset) and "value" not in fields:
            return StoredParam(*common, file=file, offset=offset, sources=tuple(sources))
        case {"value": str(value)} if "file" not in fields:
            try:
                return StoredParam(*common, value=base64.b64decode(value, validate=True), sources=tuple(sources))
            except ValueError:
                return None
    return None


def _overlaps(params: Mapping[str, StoredParam]) -> list[str]:
    placed = sorted((p.file, p.offset, p.num_bytes, name) for name, p in params.items() if p.file is not None)
    return [
        f"{MANIFEST}: parameters {before[3]!r} and {after[3]!r} overlap in {after[0]}"
        for before, after in pairwise(placed)
        if before[0] == after[0] and before[1] + before[2] > after[1]
    ]


def parse_files(path: Path, files: Any) -> dict[str, tuple[int, str | None]]:
    """The files of a manifest or a journal: inside the folder, with size and checksum."""
    result: dict[str, tuple[int, str | None]] = {}
    if not isinstance(files, dict):
        raise CheckpointError(path, [f"{MANIFEST} has no files with their sizes"])
    problems = []
    for name, fields in files.items():
        match fields:
            case {"bytes": int(size)} if _is_size(size) and isinstance(fields.get("xxh3"), str | None):
                result[name] = (size, fields.get("xxh3"))
            case _:
                problems.append(f"{MANIFEST}: file {name!r} needs bytes and xxh3")
        if not all(_plain(part) for part in name.split("/")):
            problems.append(f"{MANIFEST} names {name!r}, which lies outside of the folder")
    if problems:
        raise CheckpointError(path, problems)
    return result


def files_to_json(files: Mapping[str, tuple[int, str | None]]) -> dict[str, Any]:
    return {name: {"bytes": size} | ({"xxh3": xxh3} if xxh3 else {}) for name, (size, xxh3) in files.items()}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")
