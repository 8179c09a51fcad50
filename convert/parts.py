"""Writing one part: an orbax checkpoint of a few parameters, and where orbax put their bytes.

Each parameter is one uncompressed zarr chunk, written from the array without a copy (measured: peak memory doesn't
grow). Afterwards the OCDBT index is walked once (https://google.github.io/tensorstore/kvstore/ocdbt), so that readers
need neither orbax nor tensorstore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from jaxvllm.convert.checksums import checksum, file_checksum
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.manifest import PARAMS, StoredParam


def checkpointer() -> ocp.Checkpointer:
    """Writes and reads parts. Uncompressed: bfloat16 weights hardly shrink. No copy of an array before it's written."""
    registry = type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, type_handlers.ArrayHandler()),  # unused; orbax warns when it isn't there
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, type_handler_registry=registry)
    )


def save_part(saver: ocp.Checkpointer, folder: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes {path: array} as one orbax checkpoint; ``folder`` must not exist and must be absolute."""
    saver.save(folder, args=ocp.args.PyTreeSave(dict(params)))


def index_part(
    root: Path, part: str, params: Mapping[str, np.ndarray], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, StoredParam], dict[str, tuple[int, str | None]]]:
    """The manifest's params and files for the part that was written to ``root``/params/``part``.

    Checksums are those of the arrays in memory, so that a fault on the way to the disk is found, too.
    """
    folder = root / PARAMS / part
    found = dict(_entries(folder))
    stored: dict[str, StoredParam] = {}
    covered: dict[str, int] = {}
    for path, value in params.items():
        entry = found.get(f"{path}/" + ".".join("0" * value.ndim))
        common = (value.shape, value.dtype.name, checksum(value), part)
        if isinstance(entry, bytes) and len(entry) == value.nbytes:
            stored[path] = StoredParam(*common, value=entry, sources=sources[path])
        elif isinstance(entry, tuple) and entry[2] == value.nbytes:
            name = f"{PARAMS}/{part}/{entry[0]}"
            stored[path] = StoredParam(*common, file=name, offset=entry[1], sources=sources[path])
            covered[name] = covered.get(name, 0) + value.nbytes
        else:
            raise CheckpointError(folder, [f"orbax stored parameter {path} otherwise than expected: {entry!r:.200}"])
    files: dict[str, tuple[int, str | None]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, size = file.relative_to(root).as_posix(), file.stat().st_size
        files[name] = (size, None if covered.get(name) == size else file_checksum(file))
    return stored, files


def _entries(folder: Path) -> Iterator[tuple[str, bytes | tuple[str, int, int]]]:
    """(key, value or (file, offset, bytes)) of everything in an OCDBT database of one node (100 MB of index)."""
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    for entry in tensorstore.ocdbt.dump(base, root).result()["entries"]:
        if "location" in entry:
            raise CheckpointError(folder, ["orbax's index has more than one node: write smaller parts"])
        if "inline_value" in entry:
            yield entry["key"].decode(), entry["inline_value"]
        else:
            _, directory, rest = entry["indirect_value"].split(":", 2)  # value:DIRECTORY/:d/FILE:OFFSET:BYTES
            file, offset, size = rest.rsplit(":", 2)
            yield entry["key"].decode(), (directory + file.removeprefix(":"), int(offset), int(size))
