"""Policies: who runs in this step, and how many tokens each.

A policy is a function of the scheduler. It reads the two queues, admits and preempts through the scheduler's own
operations, and returns its picks; it must not touch the pool or the arrays behind the scheduler's back. It also says
how the pool keeps free blocks and equal prefixes. Adding one is a function in a file of its own and a line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxvllm.core.free_list import FreeList, KnownLast
from jaxvllm.core.prefill_first import prefill_first
from jaxvllm.core.prefix_table import AllPublishers, LastPublisher
from jaxvllm.core.rules import Rules
from jaxvllm.core.running_first import running_first
from jaxvllm.core.step import Picks

if TYPE_CHECKING:
    from jaxvllm.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Policy:
    """`rules`: names of the fields of `Rules` that it follows. Asking it for another one is an error."""

    pick: Callable[[Scheduler], Picks | None]
    rules: frozenset[str] = frozenset()
    free_list: type[FreeList] = FreeList
    prefix_table: type[LastPublisher] | type[AllPublishers] = LastPublisher

    def problems(self, name: str, rules: Rules) -> list[str]:
        """Which of `rules` differ from the defaults although this policy, called `name`, doesn't follow them."""
        return [
            f"{field}={getattr(rules, field)!r} is not for scheduling_policy={name!r}; "
            f"it is for {', '.join(repr(other) for other, policy in POLICIES.items() if field in policy.rules)}"
            for field in Rules.__dataclass_fields__
            if field not in self.rules and getattr(rules, field) != getattr(Rules(), field)
        ]


POLICIES = {
    # enable_chunked_prefill=False asks for a budget that holds any prompt, and then this one cuts none.
    "prefill_first": Policy(prefill_first, frozenset({"enable_chunked_prefill", "share_prefixes"})),
    "running_first": Policy(running_first, frozenset(Rules.__dataclass_fields__), KnownLast, AllPublishers),
}


def rule_problems(scheduling_policy: str, rules: Rules) -> list[str]:
    """Why a scheduler can't follow these, each with the way out; [] if it can."""
    if scheduling_policy not in POLICIES:
        known = ", ".join(map(repr, sorted(POLICIES)))
        return [f"scheduling_policy={scheduling_policy!r} isn't known; known are {known}"]
    return POLICIES[scheduling_policy].problems(scheduling_policy, rules)
