"""Every decision equals that of an independent naive scheduler, at any depth of running ahead."""

from collections import deque
from typing import Any

import numpy as np
from hypothesis import given

from jaxvllm.core import Request
from jaxvllm.sampling_params import SamplingParams
from tests.core.helpers import PROPERTY, make_scheduler
from tests.core.naive import NaiveScheduler
from tests.core.workloads import END_TOKENS, VOCABULARY, Wish, Workload, workloads


def sampled(name: str, position: int) -> int:
    """A stub model: the next token depends on the request and on its length."""
    return (int(name) * 7 + position * 5 + position * position) % VOCABULARY


class Pair:
    """The scheduler and the oracle, given the same calls."""

    def __init__(self, workload: Workload) -> None:
        config = workload.config
        self.workload = workload
        self.ours = make_scheduler(**config)
        self.oracle = NaiveScheduler(
            config["block_size"],
            config["num_blocks"],
            config["max_num_seqs"],
            config["max_num_batched_tokens"],
            config["max_model_len"],
            config["max_running"],
            config["enable_prefix_caching"],
        )
        self.requests: dict[str, Request] = {}
        self.sequences: dict = {}
        self.in_flight: deque = deque()

    def event(self, what: str, number: int) -> None:
        wish, name = self.workload.wishes[number], str(number)
        if what == "add":
            ends: set[int] = set() if wish.ignore_eos else set(END_TOKENS)
            params = SamplingParams(max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos)
            request = Request.create(
                name, number, wish.prompt, params, model_eos=END_TOKENS, engine_seed=0, priority=wish.priority
            )
            self.ours.add(request)
            self.requests[name] = request
            self.sequences[name] = self.add_to_oracle(name, wish, ends)
        elif name in self.sequences and not self.sequences[name].done:
            assert self.ours.abort(name) is self.requests[name]
            self.oracle.finish(self.sequences[name], "abort")
        else:
            assert self.ours.abort(name) is None

    def add_to_oracle(self, name: str, wish: Wish, ends: set[int]) -> Any:
        return self.oracle.add(name, wish.prompt, wish.max_tokens, ends)

    def known_blocks(self) -> list[int]:
        """The blocks that the oracle could find for somebody, sorted."""
        return sorted(self.oracle.block_of_prefix.values())

    def schedule(self) -> bool:
        """One schedule() of both; whether there was something to run."""
        ours, oracle = self.ours.schedule(), self.oracle.schedule()
        assert (ours is None) == (oracle is None)
        if ours is not None and oracle is not None:
            assert ours.kind == oracle.kind
            entries = zip(
                [request.request_id for request in ours.requests],
                ours.starts.tolist(),
                ours.num_tokens.tolist(),
                ours.samples.tolist(),
                strict=True,
            )
            assert list(entries) == [(entry[0].name, *entry[1:4]) for entry in oracle.entries]
            assert [r.request_id for r in reversed(ours.preempted)] == [s.name for s in oracle.preempted]
            self.in_flight.append((ours, oracle))
        self.compare()
        return ours is not None

    def commit(self) -> None:
        ours, oracle = self.in_flight.popleft()
        tokens = [sampled(s.name, start + count) for s, start, count, _, _ in oracle.entries]
        finished = self.ours.commit(ours, np.array(tokens, np.int32))
        assert [r.request_id for r in finished] == [s.name for s in self.oracle.commit(oracle, tokens)]
        self.compare()

    def compare(self) -> None:
        ours, oracle = self.ours, self.oracle
        ours.check_integrity()
        assert [r.request_id for r in ours.waiting] == [s.name for s in oracle.waiting]
        assert [r.request_id for r in ours.running] == [s.name for s in oracle.running]
        assert ours.pool.free_blocks() == oracle.free
        assert ours.pool.cached_blocks() == self.known_blocks()
        for name, request in self.requests.items():
            sequence = self.sequences[name]
            assert request.block_table == sequence.table
            assert request.known_tokens().tolist() == sequence.known()
            assert request.finish_reason == sequence.done
            if not sequence.done:
                assert (request.num_computed, request.num_tokens) == (sequence.computed, len(sequence.tokens))


@PROPERTY
@given(workloads())
def test_every_decision_equals_the_oracle(workload):
    pair = Pair(workload)
    last_event = max(workload.events)
    number = 0
    while number <= last_event or pair.ours.has_unfinished() or pair.in_flight:
        for what, request in workload.events.get(number, []):
            pair.event(what, request)
        ran = pair.schedule()
        if pair.in_flight and (not ran or len(pair.in_flight) > workload.depth):
            pair.commit()
        number += 1
        assert number < 2000
    assert pair.ours.pool.num_free == workload.config["num_blocks"]
    counters = pair.ours.counters
    assert counters.finished_requests + counters.aborted_requests == len(workload.wishes)
