"""A device in plain Python that runs packed plans: a paged cache, attention, one token a sequence.

It knows nothing but the buffer and the table of fields, like the real one. A token's "keys and values"
depend on its id, its position and on everything before it, read through the block tables; the sampled token
depends on all of them. So a wrong slot, a block that was reused or shared wrongly, a token read from the
wrong row, or a chunk that attends to slots not written yet: all of them change the output. Slots that were
never written hold None and break whoever reads them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from jaxvllm.core import BucketTable, PlanLayout, Request, Scheduler, fill_plan
from tests.core.workloads import VOCABULARY

_MODULUS = 1_000_003
_QUERY_TILE = 3  # small, so that small chunks have several


def key_value(token: int, position: int, context: int) -> int:
    """What the cache holds for a token, from the sum over its context."""
    return (token * 7919 + position * 104_729 + context * 31 + 17) % _MODULUS


def attend(values: list[int]) -> int:
    """One number from all keys and values of a context, in which each place counts differently."""
    return sum(value * (2 * i + 1) for i, value in enumerate(values)) % _MODULUS


def sample(context: int, seed: int, position: int, vocabulary: int) -> int:
    """The next token."""
    return (context + seed % 1009 + position * 13) % vocabulary


def generate(prompt: list[int], seed: int, limit: int, ends: set[int], vocabulary: int) -> list[int]:
    """The oracle: the same model without a cache, blocks, rows or steps. Outputs up to an end or `limit`."""
    tokens = list(prompt)
    values: list[int] = []
    while True:
        for position in range(len(values), len(tokens)):
            values.append(key_value(tokens[position], position, attend(values)))
        tokens.append(sample(attend(values), seed, len(tokens), vocabulary))
        if tokens[-1] in ends or len(tokens) >= limit:
            return tokens[len(prompt) :]


class FakeDevice:
    """A cache of `num_slots` slots, a last token for each of `max_rows` rows; others are dropped."""

    def __init__(self, num_slots: int, max_rows: int, block_size: int, vocabulary: int) -> None:
        self.cache: list[int | None] = [None] * num_slots
        self.last_tokens: list[int | None] = [None] * max_rows
        self.block_size = block_size
        self.vocabulary = vocabulary

    def run(self, buffer: np.ndarray, layout: PlanLayout) -> np.ndarray:
        """Execute one step; int32[num_seqs of the bucket], the sampled tokens (-1 where nothing is)."""
        plan = unpack(buffer, layout)
        queries = self._queries(plan, layout)
        for token_at, seq, position in queries:
            source = plan["token_src"][token_at]
            token = plan["token_ids"][token_at] if source < 0 else self.last_tokens[source]
            assert token is not None
            before = [self._read(plan, seq, place) for place in range(position)]
            self._write(plan["slot_mapping"][token_at], key_value(token, position, attend(before)))
        sampled = np.full(layout.bucket.num_seqs, -1, np.int32)
        for seq, row in enumerate(plan["rows"]):
            if row < len(self.last_tokens):
                context = attend([self._read(plan, seq, i) for i in range(plan["context_lens"][seq])])
                low, high = plan["seeds"][seq]
                token = sample(context, low + (high << 32), plan["sample_positions"][seq], self.vocabulary)
                self.last_tokens[row] = token
                sampled[seq] = token
        return sampled

    def _queries(self, plan: dict[str, Any], layout: PlanLayout) -> list[tuple[int, int, int]]:
        """(place on the token axis, sequence, position) of every query token, each exactly once."""
        if layout.bucket.kind == "decode":
            live = [seq for seq, length in enumerate(plan["context_lens"]) if length > 0]
            return [(seq, seq, plan["context_lens"][seq] - 1) for seq in live]
        queries, start = [], plan["query_start"]
        for seq, first in zip(plan["tile_seq"], plan["tile_start"], strict=True):
            if seq < 0:
                continue
            for token_at in range(first, min(first + layout.query_tile, start[seq + 1])):
                # A sequence's query tokens are the last ones of its context.
                queries.append((token_at, seq, plan["context_lens"][seq] - (start[seq + 1] - token_at)))
        assert [token_at for token_at, _, _ in queries] == list(range(start[-1]))
        assert all(position == plan["positions"][token_at] for token_at, _, position in queries)
        return queries

    def _read(self, plan: dict[str, Any], seq: int, position: int) -> int:
        block = plan["block_tables"][seq][position // self.block_size]
        value = self.cache[block * self.block_size + position % self.block_size]
        assert value is not None, f"sequence {seq} reads position {position}, which was never written"
        return value

    def _write(self, slot: int, value: int) -> None:
        if 0 <= slot < len(self.cache):
            self.cache[slot] = value


def unpack(buffer: np.ndarray, layout: PlanLayout) -> dict[str, Any]:
    """The fields as nested lists, cut out of the words by `layout.fields` alone."""
    plan = {}
    for name, offset, shape, dtype in layout.fields:
        words = buffer[offset : offset + math.prod(shape)].tobytes()
        plan[name] = np.frombuffer(words, dtype).reshape(shape).tolist()
    return plan


class FakeEngine:
    """The engine's loop: a step runs when it is dispatched, its tokens are read `depth` steps later."""

    def __init__(self, scheduler: Scheduler, max_running: int, depth: int) -> None:
        self.scheduler, self.depth, self.max_rows = scheduler, depth, max_running
        num_slots = scheduler.pool.num_blocks * scheduler.block_size
        self.device = FakeDevice(num_slots, max_running, scheduler.block_size, VOCABULARY)
        budget = scheduler.max_num_batched_tokens
        self.buckets = BucketTable([1, scheduler.max_num_seqs], [2, budget], scheduler.max_num_seqs)
        self.drop_slot = num_slots
        self.in_flight: deque = deque()
        self.finished: list[Request] = []

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            bucket = self.buckets.pick(step)
            layout = PlanLayout(
                bucket, self.scheduler.table_width, self.max_rows, self.drop_slot, query_tile=_QUERY_TILE
            )
            tokens = self.device.run(fill_plan(step, self.scheduler, layout), layout)
            self.in_flight.append((step, tokens[: len(step.requests)]))
        self.scheduler.check_integrity()
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.finished += self.scheduler.commit(*self.in_flight.popleft())
            self.scheduler.check_integrity()
