"""Our format: a folder that holds a model ready to be restored.

    DIR/manifest.json            versions, origin, each parameter's shape, dtype, checksum and place, each file's size
    DIR/params/part-00000/ ...   orbax checkpoints, each a flat dict {path: array} of canonical (tp = 1) ones
    DIR/config.json, generation_config.json, tokenizer files: as the source had them

The parameters lie in several orbax checkpoints so that writing needs the memory of one part, and so that each of them
is complete or absent. ``orbax.checkpoint`` alone can restore a part. We read the bytes where the manifest says that
they are: measured, that is 5 times as fast as restoring through orbax, needs no second copy, and any slice can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from jaxvllm.config import ModelConfig
from jaxvllm.convert.checksums import checksum, file_checksum
from jaxvllm.convert.files import ParallelReader, Piece, Stored, cut, fill, fill_slice
from jaxvllm.convert.manifest import FORMAT, MANIFEST, Manifest, StoredParam, read_manifest
from jaxvllm.convert.memory import FRESH, Lease
from jaxvllm.convert.pace import PACE
from jaxvllm.convert.tables import allocate, canonical_table, cut_from_whole, host_dtype, part_shape, slices_of
from jaxvllm.models.params import Index, ParamInfo, Table

SMALL_BYTES = 1 << 20


class OurReader:
    """One opened folder of ours. ``stored``: the manifest's parameters by path."""

    format = FORMAT

    def __init__(self, path: Path, readers: int = PACE.readers) -> None:
        self.path = path.absolute()
        self.manifest = read_manifest(path)
        self.stored: dict[str, StoredParam] = self.manifest.params
        self.canonical = canonical_table(ModelConfig.from_dir(path))
        self.threads = ParallelReader(readers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.threads.close()

    def problems(self, table: Table) -> list[str]:
        """Everything wrong with this folder for ``table`` (any tp): files; missing, unused, mis-shaped."""
        problems = file_problems(self.path, self.manifest)
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

    def read(self, info: ParamInfo, dtype: np.dtype | None = None, lease: Lease = FRESH) -> np.ndarray:
        """One parameter in ``info``'s form (any tp) and ``dtype`` (None: as stored).

        Host memory: the parameter; where key/value heads are stored several times, the canonical one too.
        """
        stored, have = self.stored[info.path], self.canonical[info.path]
        wanted = dtype or host_dtype(stored.dtype)
        if stored.file is None:
            return reform(stored.inline().astype(wanted, copy=False), have, info)
        place = stored.at(self.path, info.path)
        if same_form(have, info):
            return self.threads.read(place, wanted, lease)
        if len(info.sources) == 1:  # padded rows of the vocabulary
            dest = allocate(info, wanted, lease)
            self.threads.run(cut(fill(place, dest[info.sources[0].index])), dest.nbytes)
            return dest
        return reform(self.threads.read(place, wanted, lease), have, info)

    def shards(self, info: ParamInfo, dtype: np.dtype, lease: Lease = FRESH) -> Callable[[Index], np.ndarray]:
        """A function index -> that part of the parameter, reading no other bytes where they lie in runs of some length.

        Otherwise (columns of a matrix, another form than stored) the parameter is read whole, once.
        """
        whole = cut_from_whole(lambda: self.read(info, dtype, lease), lease)
        if self._place_of(info) is None:
            return whole

        def part(index: Index) -> np.ndarray:
            out = lease.empty(part_shape(info, index), dtype)
            pieces = self.pieces(info, index, out)
            if pieces is None:
                return whole(index)
            self.threads.run(cut(pieces), out.nbytes)
            return out

        return part

    def pieces(self, info: ParamInfo, index: Index, out: np.ndarray) -> list[Piece] | None:
        """Long pieces that fill ``out``, any memory of the part's shape; None where all of it is read first."""
        place = self._place_of(info)
        found = None if place is None else fill_slice(place, slices_of(info, index), out)
        return None if found is None else list(found)

    def _place_of(self, info: ParamInfo) -> Stored | None:
        """Where a parameter lies in ``info``'s form, or None."""
        stored = self.stored[info.path]
        in_a_file = stored.file is not None and same_form(self.canonical[info.path], info)
        return stored.at(self.path, info.path) if in_a_file else None

    def stored_dtype(self, info: ParamInfo) -> np.dtype:
        return host_dtype(self.stored[info.path].dtype)

    def checksum(self, path: str) -> str:
        """Of the bytes that are on the disk now."""
        return checksum(self.read(self.canonical[path]))


def file_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are absent, have another size than they were written with, or are another checkpoint's.

    Small ones (orbax's index of a part, with its uuid) are compared by checksum; ``verify`` does it for all.
    """
    problems = []
    for name, (size, xxh3) in manifest.files.items():
        file = folder / name
        if not os.path.isfile(file):  # unlike Path.is_file, False for a name that no disk could hold
            problems.append(f"file {name} isn't there: convert the model again")
        elif file.stat().st_size != size:
            problems.append(f"file {name} has {file.stat().st_size} bytes, {MANIFEST} says {size}: it is damaged")
        elif xxh3 and size <= SMALL_BYTES and file_checksum(file) != xxh3:
            problems.append(f"file {name} differs from its checksum: it is damaged or another checkpoint's")
    return problems


def same_form(have: ParamInfo, want: ParamInfo) -> bool:
    return have.shape == want.shape and have.sources == want.sources


def reform(value: np.ndarray, have: ParamInfo, want: ParamInfo) -> np.ndarray:
    """A parameter from one table's form to another's, by way of the tensors both are made of.

    What differs between tables of one model: key/value heads stored several times, padded vocabulary rows.
    """
    if same_form(have, want):
        return value
    return want.assemble({source.name: source.take(value) for source in have.sources})


def _source_shapes(info: ParamInfo) -> dict[str, tuple[int, ...]]:
    return {source.name: source.shape for source in info.sources}
