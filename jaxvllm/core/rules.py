"""Rules: what the caller may choose about a scheduling policy, apart from sizes; checked when made.

Owns names, defaults and errors. Must not know how a policy follows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ORDERS = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class Rules:
    """policy: who is next, and who loses its blocks when they run out.
        "fcfs": in order of arrival; the request that started last is preempted.
        "priority": by (Request.priority, arrival), smaller first; the largest is preempted.
    long_prefill_token_threshold: tokens of one request in one step at most; 0: no limit but the step's.
    reserve_full_prompt: admit a request only when blocks for all its tokens are free, though it takes only those of
        its first chunk; False: when its first chunk fits.
    enable_chunked_prefill: False computes each prompt in one step.
    share_prefixes: a request waits while another one computes blocks that it could use.
    """

    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    reserve_full_prompt: bool = True
    enable_chunked_prefill: bool = True
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with the values, each with its name and the way out."""
        found = []
        if self.policy not in ORDERS:
            found.append(f"policy={self.policy!r} must be one of {', '.join(map(repr, ORDERS))}")
        threshold: Any = self.long_prefill_token_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            found.append(f"long_prefill_token_threshold={threshold!r} must be a whole number of at least 0")
        elif threshold and not self.enable_chunked_prefill:
            found.append(
                f"long_prefill_token_threshold={threshold} cuts prompts, but enable_chunked_prefill=False keeps them "
                "whole: leave one of them out"
            )
        for name in ("reserve_full_prompt", "enable_chunked_prefill", "share_prefixes"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name}={getattr(self, name)!r} must be True or False")
        return found
