"""running_first: every decision equals that of an independent naive scheduler, at any depth of running ahead."""

from collections import deque

from hypothesis import given, settings

from jaxvllm.core import Request, Rules
from tests.core.helpers import PROPERTY, make_scheduler
from tests.core.naive_running import NaiveRunningFirst
from tests.core.test_oracle import Pair
from tests.core.workloads import workloads


class RunningPair(Pair):
    """The same, of running_first."""

    def __init__(self, workload):
        self.workload = workload
        self.ours = make_scheduler(**workload.config, scheduling_policy="running_first", rules=Rules(**workload.rules))
        self.oracle = NaiveRunningFirst(workload.config, workload.rules)
        self.requests: dict[str, Request] = {}
        self.sequences: dict = {}
        self.in_flight: deque = deque()

    def add_to_oracle(self, name, wish, ends):
        return self.oracle.add(name, wish.prompt, wish.max_tokens, ends, wish.priority)

    def known_blocks(self):
        return sorted(block for _, block in self.oracle.published)

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

    def compare(self):
        super().compare()
        assert len(self.ours.running) <= self.ours.max_num_seqs


@settings(PROPERTY, max_examples=150)
@given(workloads(running_first=True))
def test_every_decision_equals_the_oracle(workload):
    pair = RunningPair(workload)
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
