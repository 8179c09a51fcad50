"""Hugging Face folders: model.safetensors, or shards that model.safetensors.index.json names.

The index decides what is read; a safetensors file beside it that it doesn't name is ignored and logged.
Everything is checked before the first weight goes to a device, and reported in one error.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.files import MIN_RUN_BYTES, ParallelReader, Piece, cut, fill, shortest_run_bytes
from jaxvllm.convert.memory import FRESH, Lease
from jaxvllm.convert.pace import PACE
from jaxvllm.convert.safetensors_io import TensorEntry, read_header, read_unique
from jaxvllm.convert.tables import FLOAT_DTYPES, allocate, covered, cut_from_whole
from jaxvllm.models.params import Index, ParamInfo, Source, Table

logger = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that older versions of transformers saved; they follow from config.json and are computed from it.
IGNORED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_COMPARE_ELEMENTS = 1 << 24
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class HFReader:
    """One opened folder. ``tensors``: what the index (or the single file) names, by name.

    Opening raises only when there is nothing to open; ``problems`` reports what else is wrong, with the rest.
    """

    format = "hf"

    def __init__(self, path: Path, readers: int = PACE.readers) -> None:
        self.path = path
        self.threads = ParallelReader(readers)
        self.tensors: dict[str, TensorEntry] = {}
        self.files: tuple[str, ...] = ()
        self._problems: list[str] = []
        self._broken: set[str] = set()  # tensors whose absence is explained already
        self._all_broken = False  # nothing is known about any tensor
        check_folder(path)
        if (path / INDEX).is_file():
            self._open_index()
        else:
            self.files = (SINGLE,)
            tensors = self._header(SINGLE)
            self.tensors, self._all_broken = tensors or {}, tensors is None

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.threads.close()

    def problems(self, table: Table) -> list[str]:
        """Everything wrong with this folder for ``table``: files; missing, unused, mis-shaped; tied head."""
        needed = {s.name: s.shape for info in table.values() for s in info.sources}
        problems = list(self._problems)
        problems += [self._missing(name) for name in needed if name not in self.tensors and not self._explained(name)]
        for name, entry in self.tensors.items():
            if name in needed:
                if entry.shape != needed[name]:
                    problems.append(f"mis-shaped tensor {name}: {list(entry.shape)}, expected {list(needed[name])}")
                problems += _dtype_problems(entry)
            elif name == HEAD and EMBEDDING in needed:
                problems += self._tied_head_problems(needed[EMBEDDING])
            elif IGNORED.search(name):
                logger.info("%s: %s is computed from config.json, the stored one is ignored", self.path, name)
            else:
                problems.append(f"unused tensor {name} {list(entry.shape)}: config.json's model has no place for it")
        return problems

    def read(self, info: ParamInfo, dtype: np.dtype | None = None, lease: Lease = FRESH) -> np.ndarray:
        """One parameter, read into its place from its tensors, in ``dtype`` (None: its tensors', or the widest).

        Host memory: the parameter, and for tensors in short runs (key/value heads stored several times) one of them.
        """
        dest = allocate(info, dtype or self.stored_dtype(info), lease)
        jobs: list[Callable[[], None]] = []
        for source in info.sources:
            stored, part = self.tensors[source.name].stored, dest[source.index]
            if _in_long_runs(source, part):
                jobs += cut(fill(stored, part))
            else:
                jobs.append(lambda source=source, stored=stored: source.place(dest, stored.read()))
        self.threads.run(jobs, dest.nbytes)
        return dest

    def pieces(self, info: ParamInfo, index: Index, out: np.ndarray) -> list[Piece] | None:
        """Long pieces that fill ``out``, any memory of the part's shape; None for what is cut, padded or joined."""
        if out.shape != info.shape or not covered(info):
            return None
        parts = [(source, out[source.index]) for source in info.sources]
        if not all(_in_long_runs(source, part) for source, part in parts):
            return None
        return [piece for source, part in parts for piece in fill(self.tensors[source.name].stored, part)]

    def shards(self, info: ParamInfo, dtype: np.dtype, lease: Lease = FRESH) -> Callable[[Index], np.ndarray]:
        """Parts of one parameter; it is read once, at the first call."""
        return cut_from_whole(lambda: self.read(info, dtype, lease), lease)

    def stored_dtype(self, info: ParamInfo) -> np.dtype:
        """The widest dtype of a parameter's tensors."""
        return np.result_type(*{FLOAT_DTYPES[self.tensors[s.name].dtype] for s in info.sources})

    def source_files(self, info: ParamInfo) -> list[str]:
        """Names of the files that hold a parameter's tensors."""
        return sorted({self.tensors[s.name].file.relative_to(self.path).as_posix() for s in info.sources})

    def _open_index(self) -> None:
        weight_map = self._weight_map()
        if weight_map is None:
            self._all_broken = True
            return
        self.files = tuple(dict.fromkeys(weight_map.values()))
        headers = {file: self._header(file) for file in self.files}
        for name, file in weight_map.items():
            held = headers[file]
            if held is None:
                self._broken.add(name)
            elif name not in held:
                self._broken.add(name)
                self._problems.append(f"missing tensor {name}: {INDEX} places it in {file}, which doesn't hold it")
            else:
                self.tensors[name] = held[name]
        for held in filter(None, headers.values()):
            for name in sorted(held.keys() - weight_map.keys()):
                self._log_stray(f"{name} in {held[name].file.name}")
        for file in sorted(self.path.glob("*.safetensors")):
            if file.name not in self.files:
                self._log_stray(file.name)

    def _log_stray(self, what: str) -> None:
        logger.warning("%s: %s isn't named by %s and is not read", self.path, what, INDEX)

    def _weight_map(self) -> dict[str, str] | None:
        try:
            index = read_unique(self.path / INDEX)
        except (OSError, ValueError, RecursionError) as error:
            self._problems.append(f"{INDEX} can't be read as JSON: {error}")
            return None
        weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            self._problems.append(f"{INDEX} has no weight_map that maps tensor names to file names")
            return None
        return weight_map

    def _header(self, file: str) -> dict[str, TensorEntry] | None:
        """The tensors of one file; None when it can't be used, with the reason among the problems."""
        if not _stays_inside(file):
            self._problems.append(f"{INDEX} names {file!r}, which lies outside of the folder")
            return None
        if not os.path.isfile(self.path / file):  # unlike Path.is_file, False for a name that no disk could hold
            self._problems.append(f"{INDEX} names {file!r}, which isn't there: download it again")
            return None
        try:
            return read_header(self.path / file)
        except CheckpointError as error:
            self._problems += [f"{file}: {problem}" for problem in error.problems]
            return None

    def _explained(self, name: str) -> bool:
        return name in self._broken or self._all_broken

    def _missing(self, name: str) -> str:
        if name == HEAD:
            return (
                f"missing tensor {name}: config.json says tie_word_embeddings=false; "
                f"set it to true if the head is {EMBEDDING}"
            )
        return f"missing tensor {name}"

    def _tied_head_problems(self, shape: tuple[int, ...]) -> list[str]:
        """A tied model may carry its head again: the same values are dropped, others are an error."""
        head, embedding = self.tensors[HEAD], self.tensors.get(EMBEDDING)
        if head.dtype not in FLOAT_DTYPES:
            return _dtype_problems(head)
        if embedding is None or embedding.shape != shape or embedding.dtype not in FLOAT_DTYPES:
            return []  # the embedding's own problem is listed
        first, second = (f"{e.name} ({e.dtype} {list(e.shape)})" for e in (head, embedding))
        names = f"{first} and {second}"
        fix = "but config.json says tie_word_embeddings=true: set it to false to use the head, or remove it"
        if head.shape != embedding.shape:
            return [f"{names} differ in shape, {fix}"]
        row = _first_difference(head, embedding)
        if row is None:
            logger.info("%s: %s equals %s and is dropped", self.path, HEAD, EMBEDDING)
            return []
        return [f"{names} differ, first in row {row}, {fix}"]


def _in_long_runs(source: Source, part: np.ndarray) -> bool:
    """Whether a tensor can be read straight into its part of a parameter."""
    return source.repeat == 1 and shortest_run_bytes(part) >= min(MIN_RUN_BYTES, part.nbytes)


def _dtype_problems(entry: TensorEntry) -> list[str]:
    if entry.dtype in FLOAT_DTYPES:
        return []
    return [f"dtype {entry.dtype} of {entry.name} isn't supported; supported are {', '.join(FLOAT_DTYPES)}"]


def _stays_inside(name: str) -> bool:
    # By name, not by resolving: a model hub's cache consists of links to files elsewhere.
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _first_difference(a: TensorEntry, b: TensorEntry) -> int | None:
    """The first row in which two matrices of one shape differ; None when they don't. Bounded memory."""
    rows, width = a.shape[0], int(np.prod(a.shape[1:]))
    step = max(1, _COMPARE_ELEMENTS // max(width, 1))
    for first in range(0, rows, step):
        count = min(step, rows - first) * width
        x, y = (e.stored.read(first * width, count) for e in (a, b))
        if a.dtype != b.dtype:
            x, y = x.astype(np.float32), y.astype(np.float32)
        same = (x.view(np.uint8) == y.view(np.uint8)).reshape(count // width, -1).all(axis=1)
        if not same.all():
            return first + int(np.argmin(same))
    return None


def check_folder(path: Path) -> None:
    """Raises CheckpointError when there are no safetensors to open here, and says what would help."""
    if not (path / INDEX).is_file() and not (path / SINGLE).is_file():
        raise CheckpointError(path, [_nothing_to_read(path)])


def _nothing_to_read(path: Path) -> str:
    what = f"holds neither {SINGLE} nor {INDEX}"
    names = sorted(f.name for f in path.iterdir())
    stray = [n for n in names if n.endswith(".safetensors")]
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if stray:
        return f"{what}, but {', '.join(stray)}: add their index, or rename a single file to {SINGLE}"
    if pickles:
        return (
            f"{what}, only {', '.join(pickles)}: a pickle can run code when it is read, so it isn't. "
            "Convert it where you trust it, with transformers' save_pretrained(DIR, safe_serialization=True)"
        )
    return what
