"""Loading: either format, one parameter at a time, onto whatever the caller's ``put`` puts it on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.hf import HFReader, check_folder
from jaxvllm.convert.tables import host_dtype
from jaxvllm.models.params import ParamInfo, Table


class Reader(AbstractContextManager[Any], Protocol):
    """What both formats offer."""

    path: Path
    format: str

    def problems(self, table: Table) -> list[str]:
        """Everything that keeps this checkpoint from filling ``table``."""
        ...

    def read(self, info: ParamInfo, dtype: np.dtype | None = None) -> np.ndarray:
        """One parameter of a table without problems, in host memory that belongs to the caller."""
        ...


def detect(path: str | os.PathLike[str]) -> str:
    """ "jaxvllm" for a folder with our manifest, "hf" for one with safetensors.

    Raises CheckpointError for anything else, and says what would help.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(path, ["is not a directory; give a folder with config.json and weights"])
    if (folder / "manifest.json").is_file():
        return "jaxvllm"
    check_folder(folder)
    return "hf"


def open_checkpoint(path: str | os.PathLike[str]) -> Reader:
    """The reader for this folder's format; a context manager."""
    folder = Path(path)
    if detect(folder) == "jaxvllm":
        from jaxvllm.convert.checkpoint import OrbaxReader  # orbax takes seconds to import

        return OrbaxReader(folder)
    return HFReader(folder)


def verify_table(path: str | os.PathLike[str], table: Table) -> None:
    """Raises CheckpointError with every problem that keeps ``path`` from filling ``table``."""
    with open_checkpoint(path) as reader:
        check(reader, table)


def load_params[Placed](
    path: str | os.PathLike[str],
    table: Table,
    *,
    dtype: DTypeLike,
    put: Callable[[ParamInfo, np.ndarray], Placed],
) -> dict[str, Placed]:
    """{path: put(info, array)} for every parameter of ``table`` (the family's, at any tp), in its order.

    dtype: what each parameter is cast to (round to nearest even), a name or a numpy or jax type. put: shards
    and transfers one parameter; the array isn't used afterwards, so it may be kept or aliased. Both formats
    give identical arrays. Host memory: one parameter and its tensors at a time.

    Raises CheckpointError, before the first ``put``, with everything missing, unused, mis-shaped or damaged.
    """
    wanted = host_dtype(dtype)
    with open_checkpoint(path) as reader:
        check(reader, table)
        return {info.path: put(info, reader.read(info, wanted)) for info in table.values()}


def check(reader: Reader, table: Table) -> None:
    """Raises CheckpointError with every problem of an opened checkpoint."""
    problems = reader.problems(table)
    if problems:
        raise CheckpointError(reader.path, problems)
