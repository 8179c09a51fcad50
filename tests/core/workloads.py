"""Random workloads for the property tests: tiny pools, shared prefixes, aborts, limits of all kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

VOCABULARY = 6
END_TOKENS = (5,)


@dataclass
class Wish:
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    arrival: int
    abort: int | None  # before this step
    priority: int = 0


@dataclass
class Workload:
    """`config` are Scheduler's keywords; every prompt fits. `reset`: before this step, forget prefixes."""

    config: dict[str, Any]
    wishes: list[Wish]
    depth: int
    reset: int | None
    rules: dict[str, Any] = field(default_factory=dict)  # of running_first; {}: prefill_first's defaults
    events: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, wish in enumerate(self.wishes):
            self.events.setdefault(wish.arrival, []).append(("add", number))
            if wish.abort is not None:
                self.events.setdefault(wish.abort, []).append(("abort", number))
        if self.reset is not None:
            self.events.setdefault(self.reset, []).append(("reset", -1))


@st.composite
def workloads(
    draw: st.DrawFn, resets: bool = False, running_first: bool = False, share: bool = False, aborts: bool = True
) -> Workload:
    """Few and small numbers: what goes wrong goes wrong at borders, and borders must be met often."""
    block_size = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(2, 12))
    max_model_len = draw(st.integers(2, num_blocks * block_size + 4))
    longest = min(max_model_len - 1, num_blocks * block_size)
    config = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(1, 12)),
        "max_model_len": max_model_len,
        "max_running": draw(st.none() | st.integers(1, 5)),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
    }
    rules: dict[str, Any] = {}
    if running_first:
        rules["policy"] = draw(st.sampled_from(["fcfs", "priority"]))
        rules["reserve_full_prompt"] = draw(st.booleans())
        rules["enable_chunked_prefill"] = draw(st.sampled_from([True, True, True, False]))
        if rules["enable_chunked_prefill"]:
            rules["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 1, 2, 5]))
        else:
            config["max_num_batched_tokens"] = longest + draw(st.integers(0, 4))
            rules["long_prefill_token_threshold"] = 0
    if share:
        rules["share_prefixes"] = True
    token = st.integers(0, 2)  # so few that prefixes repeat
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=3 * block_size), min_size=1, max_size=2))

    def prompt() -> list[int]:
        tail = draw(st.lists(token, min_size=1, max_size=2 * block_size))
        return (draw(st.sampled_from([*stems, []])) + tail)[:longest]

    wishes = [
        Wish(
            prompt=prompt(),
            max_tokens=draw(st.integers(1, 12)),
            ignore_eos=draw(st.booleans()),
            arrival=draw(st.integers(0, 12)),
            abort=draw(st.none() | st.none() | st.integers(0, 30)) if aborts else None,
            priority=draw(st.integers(-1, 1)) if running_first else 0,
        )
        for _ in range(draw(st.integers(1, 7)))
    ]
    reset = draw(st.none() | st.integers(0, 20)) if resets else None
    return Workload(config, wishes, draw(st.integers(0, 2)), reset, rules)
