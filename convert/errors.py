"""The one error of this folder: everything that is wrong with a checkpoint, listed together."""

from __future__ import annotations

import os
from collections.abc import Sequence


class CheckpointError(ValueError):
    """A folder that can't be loaded, converted or written.

    path: the folder (or file). problems: one sentence each, in the order found; never empty.
    """

    def __init__(self, path: str | os.PathLike[str], problems: Sequence[str]) -> None:
        super().__init__(os.fspath(path), tuple(problems))  # both in args: the error survives pickling
        self.path = os.fspath(path)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.path}: {self.problems[0]}"
        return f"{self.path} has {len(self.problems)} problems:" + "".join(f"\n  - {p}" for p in self.problems)
