"""running_first: every decision equals that of an independent naive scheduler, at any depth of running ahead."""

from collections import deque

import numpy as np
from hypothesis import given, settings

from jaxvllm.core import Request, Rules
from jaxvllm.sampling_params import SamplingParams
from tests.core.helpers import PROPERTY, make_scheduler
from tests.core.naive_running import NaiveRunningFirst
from tests.core.test_oracle import sampled
from tests.core.workloads import END_TOKENS, workloads


class Pair:
    """The scheduler and the oracle, given the same calls."""

    def __init__(self, workload):
        self.workload = workload
        self.ours = make_scheduler(**workload.config, scheduling_policy="running_first", rules=Rules(**workload.rules))
        self.oracle = NaiveRunningFirst(workload.config, workload.rules)
        self.requests: dict[str, Request] = {}
        self.sequences: dict = {}
        self.in_flight: deque = deque()

    def event(self, what, number):
        wish, name = self.workload.wishes[number], str(number)
        if what == "add":
            ends = set() if wish.ignore_eos else set(END_TOKENS)
            params = SamplingParams(max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos)
            request = Request.create(
                name, number, wish.prompt, params, model_eos=END_TOKENS, engine_seed=0, priority=wish.priority
            )
            self.ours.add(request)
            self.requests[name] = request
            self.sequences[name] = self.oracle.add(name, wish.prompt, wish.max_tokens, ends, wish.priority)
        elif name in self.sequences and not self.sequences[name].done:
            assert self.ours.abort(name) is self.requests[name]
            self.oracle.finish(self.sequences[name], "abort")
        else:
            assert self.ours.abort(name) is None

    def schedule(self) -> bool:
        ours, oracle = self.ours.schedule(), self.oracle.schedule()
        assert (ours is None) == (not oracle.entries)
        assert [r.request_id for r in self.ours.preempted_now] == [s.name for s in oracle.preempted]
        if ours is not None:
            names = [request.request_id for request in ours.requests]
            numbers = (ours.starts.tolist(), ours.num_tokens.tolist(), ours.samples.tolist())
            assert list(zip(names, *numbers, strict=True)) == [(s.name, *rest) for s, *rest, _ in oracle.entries]
            assert ours.num_query_tokens <= self.ours.max_num_batched_tokens
            self.in_flight.append((ours, oracle))
        self.compare()
        return ours is not None

    def commit(self):
        ours, oracle = self.in_flight.popleft()
        tokens = [sampled(s.name, start + count) for s, start, count, _, _ in oracle.entries]
        finished = self.ours.commit(ours, np.array(tokens, np.int32))
        assert [r.request_id for r in finished] == [s.name for s in self.oracle.commit(oracle, tokens)]
        self.compare()

    def compare(self):
        ours, oracle = self.ours, self.oracle
        ours.check_integrity()
        assert [r.request_id for r in ours.waiting] == [s.name for s in oracle.waiting]
        assert [r.request_id for r in ours.running] == [s.name for s in oracle.running]
        assert len(ours.running) <= ours.max_num_seqs
        assert ours.pool.free_blocks() == oracle.free
        assert ours.pool.cached_blocks() == sorted(block for _, block in oracle.published)
        for name, request in self.requests.items():
            sequence = self.sequences[name]
            assert request.block_table == sequence.table
            assert request.known_tokens().tolist() == sequence.known()
            assert request.finish_reason == sequence.done
            if not sequence.done:
                assert (request.num_computed, request.num_tokens) == (sequence.computed, len(sequence.tokens))


@settings(PROPERTY, max_examples=150)
@given(workloads(running_first=True))
def test_every_decision_equals_the_oracle(workload):
    pair = Pair(workload)
    last_event, number = max(workload.events), 0
    while number <= last_event or pair.ours.has_unfinished() or pair.in_flight:
        for what, request in workload.events.get(number, []):
            pair.event(what, request)
        ran = pair.schedule()
        while len(pair.in_flight) > (workload.depth if ran else 0):
            pair.commit()
        number += 1
        assert number < 3000
    assert pair.ours.pool.num_free == workload.config["num_blocks"]
    counters = pair.ours.counters
    assert counters.finished_requests + counters.aborted_requests == len(workload.wishes)
