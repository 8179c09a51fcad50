"""Writing checkpoints: Hugging Face -> ours, and back.

A folder is written beside its final name and renamed at the end, so that under that name there is either
nothing (or what was there before) or a whole checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import jaxvllm
from jaxvllm.config import DTYPE_BYTES, ModelConfig, read_json
from jaxvllm.convert.checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PARAMS,
    OrbaxReader,
    StoredParam,
    checkpointer,
    num_elements,
    save_part,
)
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.hf import SINGLE, HFReader
from jaxvllm.convert.load import check, detect
from jaxvllm.convert.safetensors_io import write_file
from jaxvllm.convert.tables import canonical_table, host_dtype
from jaxvllm.models.params import Table

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20  # a part ends with the parameter that reaches this; what conversion holds in memory
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
          "chat_template.json", "LICENSE", "LICENSE.txt")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """What was written. num_bytes: of the weights."""

    path: Path
    num_tensors: int
    num_params: int
    num_bytes: int


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    force: bool = False,
) -> Written:
    """A Hugging Face folder -> our format. Weights keep their dtype, bit for bit, unless ``dtype`` is given.

    force: replace a checkpoint that is there already (nothing else is ever replaced).
    Raises CheckpointError for a source with any problem, before any weight is written, and for a target in
    the way.
    """
    src = Path(src)
    if detect(src) != "hf":
        raise CheckpointError(src, ["is in our format already; the way back is --to hf"])
    wanted = _output_dtype(dtype)
    table = canonical_table(ModelConfig.from_dir(src))
    reader = HFReader(src)
    check(reader, table)
    with building(dst, src=src, force=force) as folder:
        stored = _write_parts(reader, table, wanted, folder / PARAMS)
        files = {
            f.relative_to(folder).as_posix(): f.stat().st_size
            for f in sorted((folder / PARAMS).rglob("*"))
            if f.is_file()
        }
        _copy_beside(src, folder, wanted)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "tool_version": jaxvllm.__version__,
            "source": {name: (src / name).stat().st_size for name in reader.files},
            "params": {path: {"shape": s.shape, "dtype": s.dtype, "part": s.part} for path, s in stored.items()},
            "files": files,
        }
        (folder / MANIFEST).write_text(_manifest_text(manifest), encoding="utf-8")
    sizes = [int(np.prod(s.shape)) * host_dtype(s.dtype).itemsize for s in stored.values()]
    return Written(Path(dst), len(stored), num_elements(stored), sum(sizes))


def _write_parts(reader: HFReader, table: Table, dtype: np.dtype | None, params: Path) -> dict[str, StoredParam]:
    stored: dict[str, StoredParam] = {}
    part: dict[str, np.ndarray] = {}
    number = 0
    with checkpointer() as saver:
        for i, info in enumerate(table.values()):
            value = part[info.path] = reader.read(info, dtype)
            stored[info.path] = StoredParam(value.shape, value.dtype.name, f"part-{number:05d}")
            if sum(v.nbytes for v in part.values()) >= PART_BYTES or i == len(table) - 1:
                save_part(saver, params.absolute() / f"part-{number:05d}", part)
                logger.info("wrote part %d: %d of %d parameters", number, i + 1, len(table))
                part, number = {}, number + 1
    return stored


def export_hf(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    force: bool = False,
) -> Written:
    """Our format -> a Hugging Face folder with one model.safetensors, bit for bit without ``dtype``."""
    src = Path(src)
    if detect(src) != "jaxvllm":
        raise CheckpointError(src, ["is a Hugging Face folder already; without --to hf it is converted to ours"])
    wanted = _output_dtype(dtype)
    with OrbaxReader(src) as reader, building(dst, src=src, force=force) as folder:
        table = reader.canonical
        check(reader, table)
        shapes = {
            source.name: (wanted or host_dtype(reader.stored[info.path].dtype), source.shape)
            for info in table.values()
            for source in info.sources
        }
        write_file(folder / SINGLE, shapes, _tensors_of(reader, table, wanted))
        _copy_beside(src, folder, wanted)
    num_params = sum(int(np.prod(shape)) for _, shape in shapes.values())
    num_bytes = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in shapes.values())
    return Written(Path(dst), len(shapes), num_params, num_bytes)


def _manifest_text(manifest: dict[str, Any]) -> str:
    """JSON with one line for each parameter and file, so that two manifests can be compared by eye."""
    fields = []
    for key, value in manifest.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{\n  " + ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _tensors_of(reader: OrbaxReader, table: Table, dtype: np.dtype | None) -> Iterator[tuple[str, np.ndarray]]:
    for info in table.values():
        value = reader.read(info, dtype)
        for source in info.sources:
            yield source.name, source.take(value)


def _output_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    wanted = host_dtype(dtype)
    if wanted.name not in DTYPE_BYTES:
        raise ValueError(f"dtype={wanted.name!r} can't be written; choose one of {', '.join(DTYPE_BYTES)}")
    return wanted


def _copy_beside(src: Path, folder: Path, dtype: np.dtype | None) -> None:
    """config.json (naming ``dtype`` where weights were cast to it) and whatever a tokenizer consists of."""
    if dtype is None:
        shutil.copyfile(src / "config.json", folder / "config.json")
    else:
        config: dict[str, Any] = read_json(src / "config.json")
        config.pop("torch_dtype", None)  # the old name of the same field
        config["dtype"] = dtype.name
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        if (src / name).is_file():
            shutil.copyfile(src / name, folder / name)


@contextmanager
def building(dst: str | os.PathLike[str], *, src: Path, force: bool) -> Iterator[Path]:
    """A folder beside ``dst`` that takes its name when the block ends, and is removed when the block fails.

    Raises CheckpointError when ``dst`` is there (and not an empty folder) without ``force``; when it isn't a
    checkpoint, with ``force``, too; when it is or holds ``src``; and when the disk refuses.
    """
    target, source = Path(dst).resolve(), src.resolve()
    if target == source or target in source.parents:
        raise CheckpointError(target, ["is, or holds, the source: choose another target"])
    there = target.is_dir() and any(target.iterdir())
    if target.exists() and not target.is_dir():
        raise CheckpointError(target, ["is there and isn't a folder: choose another target"])
    if there and not force:
        raise CheckpointError(target, ["is there already: choose another target, or replace it with --force"])
    if there and not (target / "config.json").is_file():
        raise CheckpointError(target, ["holds no config.json, so it isn't a checkpoint and --force won't replace it"])
    for left in target.parent.glob(f"{target.name}.partial-*"):
        logger.warning("%s was left by a conversion that was stopped or still runs; remove it if none does", left)
    work = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        work.mkdir(parents=True)
        yield work
        _take_place(work, target, there)
    except OSError as error:
        raise CheckpointError(target, [f"can't be written: {error}"]) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when it was renamed


def _take_place(work: Path, target: Path, there: bool) -> None:
    if not there:
        work.rename(target)  # also over an empty folder
        return
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    target.rename(old)
    try:
        work.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)
