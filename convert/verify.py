"""--verify: every byte read again and compared with the checksums that were taken when it was written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxvllm.config import ConfigError, ModelConfig
from jaxvllm.convert.checkpoint import SMALL_BYTES, OurReader, file_problems
from jaxvllm.convert.checksums import checksum, file_checksum
from jaxvllm.convert.errors import CheckpointError
from jaxvllm.convert.load import check, detect, open_checkpoint
from jaxvllm.convert.manifest import Manifest, read_manifest
from jaxvllm.convert.memory import Lease, Memory
from jaxvllm.convert.pace import PACE
from jaxvllm.convert.progress import ByteBar
from jaxvllm.convert.tables import canonical_table


def verify_checkpoint(path: str | os.PathLike[str], checksums: Mapping[str, str] | None = None) -> int:
    """Re-reads a checkpoint; the number of bytes compared. Raises CheckpointError that lists all that differs.

    checksums: of each parameter in its canonical form; None takes those in the folder's own manifest, which a Hugging
    Face folder hasn't got.
    """
    folder = Path(path)
    if detect(folder) == "hf" and checksums is None:
        raise CheckpointError(folder, ["has no checksums to compare with: only a folder that was converted has"])
    problems = _file_problems(folder, read_manifest(folder)) if detect(folder) == "jaxvllm" else []
    compared, memory = 0, Memory(PACE.memory_bytes)
    try:
        opened = open_checkpoint(folder)
    except ConfigError:
        if problems:  # they say it better: config.json isn't what it was
            raise CheckpointError(folder, problems) from None
        raise
    with opened as reader:
        if isinstance(reader, OurReader) and checksums is None:
            checksums = {name: stored.xxh3 for name, stored in reader.stored.items()}
        if not problems:
            check(reader, canonical_table(ModelConfig.from_dir(folder)))
        assert checksums is not None
        table = canonical_table(ModelConfig.from_dir(folder))
        total = sum(info.size * 4 for info in table.values())
        with ByteBar("Verifying", total) as bar:
            for name, info in table.items():
                where = name
                if isinstance(reader, OurReader):
                    stored = reader.stored.get(name)
                    if stored is None or stored.shape != info.shape:
                        problems.append(f"parameter {name} isn't as config.json says")
                        continue
                    where = f"{name} in {stored.file or 'manifest.json'}"
                with Lease(memory) as lease:
                    try:
                        value = reader.read(info, None, lease)
                    except CheckpointError as error:
                        problems += [f"parameter {where}: {problem}" for problem in error.problems]
                        continue
                    found = checksum(value)
                bar.add(value.size * 4)
                compared += value.nbytes
                if found != checksums.get(name):
                    problems.append(f"parameter {where} differs from its checksum: the file is damaged or another's")
    if problems:
        raise CheckpointError(folder, problems)
    return compared


def _file_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Index files, config.json and tokenizer files that aren't what was written; data files of another size."""
    problems = file_problems(folder, manifest)
    rest = {name: xxh3 for name, (size, xxh3) in manifest.files.items() if xxh3 and size > SMALL_BYTES}
    rest |= manifest.beside

    def problem(name: str) -> str | None:
        file = folder / name
        if not os.path.isfile(file):
            return f"file {name} isn't there: convert the model again"
        differs = file_checksum(file) != rest[name]
        return f"file {name} differs from its checksum: it is damaged, edited or another's" if differs else None

    with ThreadPoolExecutor(8, "verify") as pool:
        return problems + [found for found in pool.map(problem, rest) if found]
