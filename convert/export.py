"""Writing checkpoints: ours -> Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxvllm.convert.build import MEMORY_BYTES, Written, copy_beside, output_dtype
from jaxvllm.convert.checkpoint import OurReader
from jaxvllm.convert.checksums import checksum
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.hf import SINGLE
from jaxvllm.convert.load import check, detect
from jaxvllm.convert.memory import Lease, Memory
from jaxvllm.convert.progress import ByteBar
from jaxvllm.convert.safetensors_io import write_file
from jaxvllm.convert.tables import host_dtype
from jaxvllm.convert.workfolder import building
from jaxvllm.models.params import ParamInfo, Table


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
    wanted = output_dtype(dtype)
    checksums: dict[str, str] = {}
    with OurReader(src) as reader:
        table = reader.canonical
        check(reader, table)
        shapes = {
            source.name: (wanted or host_dtype(reader.stored[info.path].dtype), source.shape)
            for info in table.values()
            for source in info.sources
        }
        num_bytes = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in shapes.values())
        with (
            building(dst, src=src, force=force, job={"to": "hf"}, num_bytes=num_bytes) as work,
            ByteBar("Writing", num_bytes) as bar,
        ):
            write_file(work.path / SINGLE, shapes, _tensors_of(reader, table, wanted, checksums, bar))
            copy_beside(src, work.path, wanted)
    num_params = sum(int(np.prod(shape)) for _, shape in shapes.values())
    return Written(Path(dst), len(shapes), num_params, num_bytes, checksums)


def _tensors_of(
    reader: OurReader, table: Table, dtype: np.dtype | None, checksums: dict[str, str], bar: ByteBar
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor in the order of its parameter, the next parameter read while one is written."""

    def read(info: ParamInfo, lease: Lease) -> np.ndarray:
        value = reader.read(info, None, lease)
        if checksum(value) != reader.stored[info.path].xxh3:
            raise CheckpointError(reader.path, [f"parameter {info.path} differs from its checksum: it is damaged"])
        return value if dtype is None else value.astype(dtype, copy=False)

    infos, memory = list(table.values()), Memory(MEMORY_BYTES)
    with ThreadPoolExecutor(1, "read") as pool:

        def begin(i: int) -> tuple[Lease, Future[np.ndarray]]:
            lease = Lease(memory)
            return lease, pool.submit(read, infos[i], lease)

        lease, following = begin(0)
        for i, info in enumerate(infos):
            value, mine = following.result(), lease
            last = i + 1 == len(infos)
            ahead = not last and value.nbytes + infos[i + 1].size * value.itemsize <= MEMORY_BYTES
            if ahead:
                lease, following = begin(i + 1)
            checksums[info.path] = checksum(value)
            for source in info.sources:
                tensor = source.take(value)
                bar.add(tensor.nbytes)
                yield source.name, tensor
            del value
            mine.end()
            if not last and not ahead:
                lease, following = begin(i + 1)
