"""Prints what an experiment checked and remembers whether all of it held. For the experiments in this
folder."""

from __future__ import annotations


class Checks:
    """``check`` prints one line per claim; ``exit_code`` is 0 only if every claim held and there was one."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.num_failed = 0

    def check(self, claim: str, holds: bool, detail: str = "") -> None:
        """claim: what should hold, in words; detail: the figures behind it."""
        self.num_passed += bool(holds)
        self.num_failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {claim}" + (f" [{detail}]" if detail else ""), flush=True)

    def exit_code(self) -> int:
        """Prints the sum."""
        print(f"{self.num_passed} checks passed, {self.num_failed} failed")
        return 0 if self.num_passed and not self.num_failed else 1
