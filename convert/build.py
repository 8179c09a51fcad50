"""Writing checkpoints: Hugging Face -> ours."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import jaxvllm
from jaxvllm.config import DTYPE_BYTES, ModelConfig, read_json
from jaxvllm.convert.checksums import checksum, file_checksum
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.hf import HFReader
from jaxvllm.convert.load import check, detect
from jaxvllm.convert.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PARAMS,
    StoredParam,
    files_to_json,
    manifest_text,
    parse_files,
    parse_params,
)
from jaxvllm.convert.memory import Lease, Memory
from jaxvllm.convert.progress import ByteBar
from jaxvllm.convert.tables import canonical_table, host_dtype
from jaxvllm.convert.workfolder import WorkFolder, building, is_disk_error
from jaxvllm.models.params import Table

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20  # a part ends with the parameter that reaches this
MEMORY_BYTES = 768 << 20  # a part being written and one being read: together at most this, or one parameter more
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
          "chat_template.json", "LICENSE", "LICENSE.txt")  # fmt: skip
Files = dict[str, tuple[int, str | None]]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written. num_bytes: of the weights. checksums: of each parameter in its canonical form."""

    path: Path
    num_tensors: int
    num_params: int
    num_bytes: int
    checksums: dict[str, str]


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    force: bool = False,
) -> Written:
    """A Hugging Face folder -> our format. Weights keep their dtype, bit for bit, unless ``dtype`` is given.

    force: replace a checkpoint that is there already (nothing else is ever replaced).
    Host memory: one parameter and at most 1 GB. Raises CheckpointError for a source with any problem, before any weight
    is written, and for a target in the way or a disk that refuses.
    """
    src = Path(src)
    if detect(src) != "hf":
        raise CheckpointError(src, ["is in our format already; the way back is --to hf"])
    wanted = output_dtype(dtype)
    table = canonical_table(ModelConfig.from_dir(src))
    with HFReader(src) as reader:
        check(reader, table)
        sizes = {p: i.size * (wanted or reader.stored_dtype(i)).itemsize for p, i in table.items()}
        job = _job(src, reader.files, table, wanted)
        with building(dst, src=src, force=force, job=job, num_bytes=sum(sizes.values())) as work:
            stored, files = _resume(work, table)
            with ByteBar("Converting", sum(sizes.values())) as bar, _disk_errors():
                bar.add(sum(sizes[path] for path in stored))
                for new, new_files in _write_parts(reader, table, sizes, wanted, work, len(work.done), set(stored)):
                    stored |= new
                    files |= new_files
                    bar.add(sum(sizes[path] for path in new))
            beside = copy_beside(src, work.path, wanted)
            source = {name: (src / name).stat().st_size for name in reader.files}
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "tool_version": jaxvllm.__version__,
                "source": source,
                "params": {path: stored[path].to_json() for path in table},
                "files": files_to_json(files),
                "beside": beside,
            }
            _write_text(work.path / MANIFEST, manifest_text(manifest))
    num_params = sum(info.size for info in table.values())
    return Written(Path(dst), len(table), num_params, sum(sizes.values()), {p: s.xxh3 for p, s in stored.items()})


def _job(src: Path, files: tuple[str, ...], table: Table, dtype: np.dtype | None) -> dict[str, Any]:
    """What makes two conversions the same: only then does a run go on with another's parts."""
    stats = {name: (src / name).stat() for name in (*files, "config.json")}
    return {
        "to": FORMAT,
        "version": [FORMAT_VERSION, jaxvllm.__version__],
        "dtype": None if dtype is None else dtype.name,
        "source": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
        "params": {path: info.shape for path, info in table.items()},
        "part_bytes": PART_BYTES,
    }


def _resume(work: WorkFolder, table: Table) -> tuple[dict[str, StoredParam], Files]:
    """What an earlier run has written and what proves right; the rest of its files is removed."""
    stored: dict[str, StoredParam] = {}
    files: Files = {}
    kept = []
    for line in work.done:
        try:
            new_files = parse_files(work.path, line.get("files"))
            new = parse_params(work.path, line.get("params"), new_files)
            right = new.keys() <= table.keys() and _as_written(work.path, new, new_files)
        except (CheckpointError, OSError):
            right, new, new_files = False, {}, {}
        if not right:
            break
        kept.append(line)
        stored |= new
        files |= new_files
    work.keep(kept)
    names = {f"part-{number:05d}" for number in range(len(kept))}
    for left in work.path.iterdir():
        if left.name != PARAMS:
            left.unlink()
    for left in (work.path / PARAMS).iterdir() if (work.path / PARAMS).is_dir() else ():
        if left.name not in names:
            shutil.rmtree(left)
    return stored, files


def _as_written(folder: Path, params: Mapping[str, StoredParam], files: Files) -> bool:
    """Whether every byte of a part has its checksum."""
    for name, (size, xxh3) in files.items():
        if (folder / name).stat().st_size != size or (xxh3 and file_checksum(folder / name) != xxh3):
            return False
    return all(p.file is None or checksum(p.at(folder, path).read()) == p.xxh3 for path, p in params.items())


def _write_parts(
    reader: HFReader, table: Table, sizes: Mapping[str, int], dtype: np.dtype | None, work: WorkFolder, number: int,
    have: set[str],
) -> Iterator[tuple[dict[str, StoredParam], Files]]:  # fmt: skip
    """Reads a part while the one before it is written. ``number``: of the first part; ``have``: is written already."""
    from jaxvllm.convert.parts import checkpointer, index_part, save_part  # orbax takes seconds to import

    def save(saver: Any, name: str, part: dict[str, np.ndarray], lease: Lease) -> tuple[dict[str, StoredParam], Files]:
        save_part(saver, (work.path / PARAMS / name).absolute(), part)
        sources = {path: tuple(reader.source_files(table[path])) for path in part}
        stored, files = index_part(work.path, name, part, sources)
        params = {path: s.to_json() for path, s in stored.items()}
        work.part_done({"part": name, "params": params, "files": files_to_json(files)})
        lease.end()
        return stored, files

    missing = [info for path, info in table.items() if path not in have]
    saving: Future[tuple[dict[str, StoredParam], Files]] | None = None
    saving_bytes = 0
    part: dict[str, np.ndarray] = {}
    memory = Memory(MEMORY_BYTES)
    lease = Lease(memory)
    with checkpointer() as saver, ThreadPoolExecutor(1, "save") as pool:
        for i, info in enumerate(missing):
            held = sum(v.nbytes for v in part.values())
            if saving is not None and saving_bytes + held + sizes[info.path] > MEMORY_BYTES:
                yield saving.result()
                saving = None
            part[info.path] = reader.read(info, dtype, lease)
            if held + sizes[info.path] >= PART_BYTES or i == len(missing) - 1:
                if saving is not None:
                    yield saving.result()
                saving_bytes = held + sizes[info.path]
                saving = pool.submit(save, saver, f"part-{number:05d}", part, lease)
                part, lease, number = {}, Lease(memory), number + 1
        if saving is not None:
            yield saving.result()


class _disk_errors:
    """Turns what libraries make of a full or failing disk back into the OSError it was."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, Exception) and not isinstance(error, CheckpointError | OSError):
            found = is_disk_error(error)
            if found is not None:
                raise found from error


def output_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    wanted = host_dtype(dtype)
    if wanted.name not in DTYPE_BYTES:
        raise ValueError(f"dtype={wanted.name!r} can't be written; choose one of {', '.join(DTYPE_BYTES)}")
    return wanted


def copy_beside(src: Path, folder: Path, dtype: np.dtype | None) -> dict[str, str]:
    """config.json (naming ``dtype`` where weights were cast to it) and a tokenizer's files; their checksums by name."""
    if dtype is None:
        shutil.copyfile(src / "config.json", folder / "config.json")
    else:
        config: dict[str, Any] = read_json(src / "config.json")
        config.pop("torch_dtype", None)  # the old name of the same field
        config["dtype"] = dtype.name
        _write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        if (src / name).is_file():
            shutil.copyfile(src / name, folder / name)
    return {name: file_checksum(folder / name) for name in ("config.json", *COPIED) if (folder / name).is_file()}


def _write_text(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
