"""The folder that a checkpoint is written in, beside its final name, and the journal that lets a run be finished.

    DST.partial/lock             held (flock) by the process that writes
    DST.partial/journal.jsonl    what is being converted, then a line for each part that is complete
    DST.partial/checkpoint/      becomes DST by one rename

Under the name DST there is nothing (or what was there before), or a whole checkpoint. An error removes DST.partial; a
killed process leaves it, and the next run with the same source goes on after the last part whose checksums hold.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxvllm.convert.errors import CheckpointError

logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 20  # for indices and the manifest


class WorkFolder:
    """``path``: where to write. ``done``: journal lines of an earlier run for the same job, oldest first."""

    def __init__(self, root: Path, job: Mapping[str, Any]) -> None:
        self.path = root / "checkpoint"
        self._journal = root / "journal.jsonl"
        job = json.loads(json.dumps(job))
        lines = _read_lines(self._journal)
        self.done: list[dict[str, Any]] = lines[1:] if lines[:1] == [{"job": job}] else []
        if self.done:
            logger.warning("%s: going on after %d complete parts of an earlier run", root, len(self.done))
        else:
            self._journal.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            self._append({"job": job})
        self.path.mkdir(exist_ok=True)

    def part_done(self, line: Mapping[str, Any]) -> None:
        """Notes that a part is complete and on the disk."""
        self._append(line)

    def keep(self, lines: list[dict[str, Any]]) -> None:
        """Shortens the journal to the first of ``done``, as far as they proved right."""
        if lines != self.done:
            first = _read_lines(self._journal)[0]
            new = self._journal.with_suffix(".new")
            new.write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]), encoding="utf-8")
            new.rename(self._journal)
            self.done = lines

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._journal.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The journal up to the first line that a kill left incomplete."""
    lines: list[dict[str, Any]] = []
    if not file.is_file():
        return lines
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not text.endswith("\n") or not isinstance(line, dict):
            break
        lines.append(line)
    return lines


@contextmanager
def building(
    dst: str | os.PathLike[str], *, src: Path, force: bool, job: Mapping[str, Any], num_bytes: int
) -> Iterator[WorkFolder]:
    """The folder to write ``num_bytes`` of weights in; it takes the name ``dst`` when the block ends.

    Raises CheckpointError when ``dst`` is there (and not an empty folder) without ``force``; when it isn't a
    checkpoint, with ``force``, too; when it is or holds ``src``; when another process writes it; and when the disk is
    full, read-only or fails. An error removes what was written.
    """
    target, source = Path(dst).resolve(), src.resolve()
    if target == source or target in source.parents:
        raise CheckpointError(target, ["is, or holds, the source: choose another target"])
    root = target.with_name(f"{target.name}.partial")
    there = _check_target(target, root, force)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            try:
                work = WorkFolder(root, job)
                _check_space(root, num_bytes)
                yield work
                _take_place(work.path, target, there)
            except BaseException:  # not reached when the process is killed
                _remove(root, absences=6)  # writes that were under way may still make files, and the folder again
                raise
            _remove(root)
    except OSError as error:
        raise CheckpointError(target, [f"can't be written: {_reason(error)}; {_what_is_left(root)}"]) from error


def _check_target(target: Path, root: Path, force: bool) -> bool:
    """Whether a checkpoint is there that is to be replaced."""
    there = target.is_dir() and any(target.iterdir())
    if target.exists() and not target.is_dir():
        raise CheckpointError(target, ["is there and isn't a folder: choose another target"])
    if there and not force:
        if root.is_dir() and not (root / "checkpoint").exists():  # killed after the rename
            with suppress(CheckpointError), _locked(root):
                shutil.rmtree(root, ignore_errors=True)
        raise CheckpointError(target, ["is there already: choose another target, or replace it with --force"])
    if there and not (target / "config.json").is_file():
        raise CheckpointError(target, ["holds no config.json, so it isn't a checkpoint and --force won't replace it"])
    return there


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(root, ["is being written by another process: wait for it, or stop it"]) from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): don't convert twice to the same target", root, error.strerror)
        if not (root / "lock").is_file() or (root / "lock").stat().st_ino != os.fstat(lock.fileno()).st_ino:
            raise CheckpointError(root, ["was finished by another process just now: look at the target"])
        yield


def _check_space(root: Path, num_bytes: int) -> None:
    written = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    needed, free = num_bytes + SPARE_BYTES - written, shutil.disk_usage(root).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")


def is_disk_error(error: BaseException) -> OSError | None:
    """The OSError that a library has turned into an exception of its own (tensorstore's say it in words)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG):
            if os.strerror(number) in str(error) or errno.errorcode[number] in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return None


def _reason(error: OSError) -> str:
    hints = {errno.ENOSPC: "free some space, or choose a target on another disk", errno.EDQUOT: "the quota is used up",
             errno.EROFS: "the file system is read-only", errno.EACCES: "you may not write there"}  # fmt: skip
    words = os.strerror(error.errno) if error.errno else str(error)
    detail = f" ({error.strerror})" if error.errno and error.strerror not in (None, words) else ""
    where = f" ({error.filename})" if error.filename else ""
    hint = f": {hints[error.errno]}" if error.errno in hints else ""
    return f"{words}{detail}{where}{hint}"


def _remove(root: Path, absences: int = 1) -> None:
    """Until the folder stays away for so many looks, 50 ms apart; gives up after 2 seconds."""
    absent = 0
    for _ in range(40):
        if root.exists():
            absent = 0
            shutil.rmtree(root, ignore_errors=True)
        absent += not root.exists()
        if absent == absences:
            return
        time.sleep(0.05)


def _what_is_left(root: Path) -> str:
    return f"partial files are left in {root}: remove them" if root.exists() else "nothing is left of it"


def _take_place(work: Path, target: Path, there: bool) -> None:
    if not there:
        work.rename(target)  # also over an empty folder
    elif not _exchange(work, target):
        old = work.with_name("replaced")
        target.rename(old)
        try:
            work.rename(target)
        except OSError:
            old.rename(target)
            raise
    _sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders at once (Linux' renameat2); False where the system can't."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
