"""Experiment: when a prompt's beginning is found in the cache, and when not. Host code only, no model.

    python examples/prefix_cache_experiment.py

The engine's own scheduler is driven by hand, with made-up tokens where the device would sample:

    schedule   blocks are allocated: they have an owner, but nothing is in them yet
    (the device writes keys and values)
    commit     full blocks are published: from now on others find them
"""

from __future__ import annotations

import sys

import numpy as np
from checks import Checks

from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.step import ScheduledStep
from jaxvllm.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 4, 16


class Bench:
    """A scheduler, and the requests that a caller gave it, by name."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=64,
        )
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: list[int]) -> Request:
        request = Request.create(
            name, len(self.requests), prompt, SamplingParams(max_tokens=32), model_eos=(), engine_seed=0
        )
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def schedule(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def commit(self, step: ScheduledStep) -> None:
        """As if the device had sampled 900, 901, ... for the step's requests."""
        self.scheduler.commit(step, np.arange(900, 900 + len(step.requests), dtype=np.int32))
        self.scheduler.check_integrity()

    def admit(self, name: str, prompt: list[int]) -> Request:
        """Add, compute and commit one prompt."""
        request = self.add(name, prompt)
        self.commit(self.schedule())
        return request

    def num_holders(self, block: int) -> int:
        """In how many block tables a block is; check_integrity compares this with the pool's reference
        counts."""
        self.scheduler.check_integrity()
        return sum(block in request.block_table for request in self.requests.values())


def not_published(checks: Checks) -> None:
    print("Allocated, not published")
    bench, prompt = Bench(), list(range(10))  # two full blocks and two tokens
    first, twin = bench.add("first", prompt), bench.add("twin", prompt)
    step = bench.schedule()
    checks.check(
        "two equal prompts in one step: the second misses",
        twin.num_cached_tokens == 0,
        f"tables {first.block_table} and {twin.block_table}",
    )
    checks.check("so they share no block", not set(first.block_table) & set(twin.block_table))
    early = bench.add("early", prompt)
    ahead = bench.schedule()  # dispatched before the first step's tokens are known
    checks.check("a third one, scheduled before the first step's commit, misses too", early.num_cached_tokens == 0)
    bench.commit(step)
    late = bench.add("late", prompt)
    bench.commit(ahead)
    bench.commit(bench.schedule())
    checks.check(
        "after the commit a fourth one hits both full blocks",
        late.num_cached_tokens == 2 * BLOCK_SIZE,
        f"{late.num_cached_tokens} tokens, table {late.block_table}",
    )


def published(checks: Checks) -> None:
    print("Published: hits and reference counts")
    bench, prompt = Bench(), list(range(10))
    owner = bench.admit("owner", prompt)
    shared = owner.block_table[:2]
    free_before = bench.scheduler.pool.num_free
    sharer = bench.admit("sharer", [*prompt[:9], 77, 78])
    checks.check(
        "a prompt with the same first 9 tokens uses the owner's two full blocks",
        sharer.block_table[:2] == shared,
        f"tables {owner.block_table} and {sharer.block_table}",
    )
    checks.check("each of them has two holders", [bench.num_holders(b) for b in shared] == [2, 2])
    checks.check("and only one new block was taken", free_before - bench.scheduler.pool.num_free == 1)
    other = bench.admit("other", [50, 51, 52, 53, *prompt[4:10]])
    checks.check(
        "an equal second block after a different first one misses: hashes are chained", other.num_cached_tokens == 0
    )
    bench.scheduler.abort("owner")
    checks.check(
        "the owner goes: one holder is left, the blocks stay in use",
        [bench.num_holders(b) for b in shared] == [1, 1] and all(map(bench.scheduler.pool.in_use, shared)),
    )
    bench.scheduler.abort("sharer")
    checks.check("the last holder goes: the blocks are free", not any(map(bench.scheduler.pool.in_use, shared)))
    revived = bench.admit("revived", prompt)
    checks.check(
        "but still found, and revived with one holder",
        revived.block_table[:2] == shared and [bench.num_holders(b) for b in shared] == [1, 1],
        f"{revived.num_cached_tokens} tokens cached",
    )
    for name in ("revived", "other"):
        bench.scheduler.abort(name)
    bench.admit("large", list(range(200, 263)))  # takes all 16 blocks: everything older is overwritten
    bench.scheduler.abort("large")
    again = bench.admit("again", prompt)
    checks.check("once overwritten, they are never found again", again.num_cached_tokens == 0)


def last_block(checks: Checks) -> None:
    print("The last block of a prompt is never reused: a token must be computed to have logits")
    bench, prompt = Bench(), list(range(8))  # exactly two blocks
    bench.admit("owner", prompt)
    for length, hits in ((8, 1), (9, 2), (7, 1), (4, 0), (5, 1)):
        name = f"{length} tokens"
        request = bench.add(name, [*prompt, 8][:length])
        step = bench.schedule()
        computed = int(step.num_tokens[step.requests.index(request)])
        checks.check(
            f"the first {length} tokens again: {hits} of {-(-length // BLOCK_SIZE)} blocks are reused",
            request.num_cached_tokens == hits * BLOCK_SIZE and computed == length - hits * BLOCK_SIZE,
            f"{request.num_cached_tokens} tokens cached, {computed} computed",
        )
        bench.commit(step)
        bench.scheduler.abort(name)


def main() -> int:
    checks = Checks()
    not_published(checks)
    published(checks)
    last_block(checks)
    return checks.exit_code()


if __name__ == "__main__":
    sys.exit(main())
