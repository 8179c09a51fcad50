"""Our format: a folder that holds a model ready to be restored.

    DIR/manifest.json            versions, origin, each parameter's shape, dtype and part, each file's size
    DIR/params/part-00000/ ...   orbax checkpoints, each a flat dict {path: array} of canonical (tp = 1) ones
    DIR/config.json, generation_config.json, tokenizer files: as the source had them

The parameters lie in several orbax checkpoints so that writing needs the memory of one part, and so that each
of them is complete or absent. A small model has one part. ``orbax.checkpoint`` alone can restore a part.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxvllm.config import ModelConfig
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.safetensors_io import unique_keys
from jaxvllm.convert.tables import FLOAT_DTYPES, canonical_table, host_dtype
from jaxvllm.models.params import ParamInfo, Table

MANIFEST, FORMAT, FORMAT_VERSION, PARAMS = "manifest.json", "jaxvllm", 1, "params"
_DTYPES = {dtype.name for dtype in FLOAT_DTYPES.values()}
_CHUNK_BYTES = 64 << 20  # stored in pieces of this size: read and written in parallel


@dataclass(frozen=True, slots=True)
class StoredParam:
    """A line of the manifest: shape, numpy dtype name, and the folder under params/ that holds it."""

    shape: tuple[int, ...]
    dtype: str
    part: str


def checkpointer() -> ocp.Checkpointer:
    """Reads and writes one part. Uncompressed: bfloat16 weights hardly shrink."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


def save_part(saver: ocp.Checkpointer, folder: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes {path: array} as one orbax checkpoint; ``folder`` must not exist and must be absolute."""
    args = {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in params}
    saver.save(folder, args=ocp.args.PyTreeSave(dict(params), save_args=args))


class OrbaxReader:
    """One opened folder of ours. ``stored``: the manifest's parameters by path."""

    format = FORMAT

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        manifest = read_manifest(path)
        self.stored: dict[str, StoredParam] = _stored_params(path, manifest)
        self.file_sizes: dict[str, int] = _file_sizes(path, manifest)
        self.canonical = canonical_table(ModelConfig.from_dir(path))
        self._restorer = checkpointer()

    def __enter__(self) -> OrbaxReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._restorer.close()

    def problems(self, table: Table) -> list[str]:
        """Everything wrong with this folder for ``table`` (any tp): files; missing, unused, mis-shaped."""
        problems = []
        for name, size in self.file_sizes.items():
            file = self.path / name
            if not os.path.isfile(file):  # unlike Path.is_file, False for a name that no disk could hold
                problems.append(f"file {name} isn't there: convert the model again")
            elif file.stat().st_size != size:
                problems.append(f"file {name} has {file.stat().st_size} bytes, {MANIFEST} says {size}: it is damaged")
        for path, info in self.canonical.items():
            stored = self.stored.get(path)
            if stored is None:
                problems.append(f"missing parameter {path}")
            elif stored.shape != info.shape:
                problems.append(f"mis-shaped parameter {path}: {list(stored.shape)}, expected {list(info.shape)}")
        for path in self.stored.keys() - self.canonical.keys():
            problems.append(f"unused parameter {path}: config.json's model has no place for it")
        return problems + self._table_problems(table)

    def _table_problems(self, table: Table) -> list[str]:
        """Where ``table`` isn't this model's: another family, or another configuration."""
        if table.keys() != self.canonical.keys():
            differ = sorted(table.keys() ^ self.canonical.keys())
            return [f"config.json describes other parameters than asked for: {', '.join(differ)}"]
        return [
            f"config.json and the table asked for build {path} from different tensors"
            for path, info in table.items()
            if _source_shapes(info) != _source_shapes(self.canonical[path])
        ]

    def read(self, info: ParamInfo, dtype: np.dtype | None = None) -> np.ndarray:
        """One parameter in ``info``'s form (any tp) and ``dtype`` (None: as stored).

        Host memory: the stored parameter and, where the form differs, the result and one tensor.
        """
        stored = self._restore(info.path)
        value = stored.astype(dtype, copy=False) if dtype is not None else stored
        return reform(value, self.canonical[info.path], info)

    def _restore(self, path: str) -> np.ndarray:
        expected = self.stored[path]
        args = ocp.args.PyTreeRestore(
            item={path: 0},
            restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            value = self._restorer.restore(self.path / PARAMS / expected.part, args=args)[path]
        except (
            ValueError,
            LookupError,
            TypeError,
            OSError,
            RuntimeError,
        ) as error:  # what damaged files raise
            first_line = (str(error).splitlines() or [""])[0]
            raise CheckpointError(self.path, [f"parameter {path} can't be restored: {first_line}"]) from error
        if value.shape != expected.shape or value.dtype != host_dtype(expected.dtype):
            raise CheckpointError(
                self.path,
                [
                    f"parameter {path} is {value.dtype} {list(value.shape)}, "
                    f"{MANIFEST} says {expected.dtype} {list(expected.shape)}"
                ],
            )
        return value


def reform(value: np.ndarray, have: ParamInfo, want: ParamInfo) -> np.ndarray:
    """A parameter from one table's form to another's, by way of the tensors both are made of.

    What differs between tables of one model: key/value heads stored several times, padded vocabulary rows.
    """
    if have.shape == want.shape and have.sources == want.sources:
        return value
    return want.assemble({source.name: source.take(value) for source in have.sources})


def _source_shapes(info: ParamInfo) -> dict[str, tuple[int, ...]]:
    return {source.name: source.shape for source in info.sources}


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json, of a format version that this version reads."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"{MANIFEST} can't be read as JSON: {error}"]) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(path, [f'{MANIFEST} isn\'t one of ours: it has no "format": "{FORMAT}"'])
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            path,
            [f"format_version={version!r} isn't readable here, {FORMAT_VERSION} is: convert the model again"],
        )
    return manifest


def _stored_params(path: Path, manifest: dict[str, Any]) -> dict[str, StoredParam]:
    params = manifest.get("params")
    if not isinstance(params, dict):
        raise CheckpointError(path, [f"{MANIFEST} has no params"])
    stored, problems = {}, []
    for name, fields in params.items():
        match fields:
            case {"shape": [*shape], "dtype": str(dtype), "part": str(part)} if (
                all(type(n) is int and n >= 0 for n in shape) and dtype in _DTYPES and _plain(part)
            ):
                stored[name] = StoredParam(tuple(shape), dtype, part)
            case _:
                problems.append(
                    f"{MANIFEST}: parameter {name!r} needs shape, dtype ({', '.join(sorted(_DTYPES))}), part"
                )
    if problems:
        raise CheckpointError(path, problems)
    return stored


def _file_sizes(path: Path, manifest: dict[str, Any]) -> dict[str, int]:
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(type(n) is int for n in files.values()):
        raise CheckpointError(path, [f"{MANIFEST} has no files with their sizes"])
    outside = [name for name in files if not all(_plain(part) for part in name.split("/"))]
    if outside:
        raise CheckpointError(
            path, [f"{MANIFEST} names {name!r}, which lies outside of the folder" for name in outside]
        )
    return files


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def num_elements(stored: Mapping[str, StoredParam]) -> int:
    """Parameters that a checkpoint holds, counted one by one."""
    return sum(math.prod(s.shape) for s in stored.values())
