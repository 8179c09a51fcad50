"""No starvation and no livelock under either policy: bounds on waiting and on recomputation, over random workloads.

What the bounds rest on. prefill_first: an admission leads to a new token before its request can be preempted. Both
policies, fcfs: nobody overtakes, so running followed by waiting is the order of arrival, and only those behind lose
blocks. Hence who is first is served in every step of running_first until it ends. Under "priority" the same holds of
the order of urgency, but for places in a step: who runs first may be the least urgent, and end the step for the others
when it goes.
"""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings

from jaxvllm.core import Request, Rules
from jaxvllm.core.waiting import urgency
from jaxvllm.sampling_params import SamplingParams
from tests.core.helpers import PROPERTY, counted_up, make_request, make_scheduler, run_all
from tests.core.test_oracle import sampled
from tests.core.workloads import END_TOKENS, workloads


class Run:
    """A workload driven to its end: when each request arrived and finished, and what every step did."""

    def __init__(self, workload, policy):
        self.scheduler = make_scheduler(**workload.config, scheduling_policy=policy, rules=Rules(**workload.rules))
        self.arrived: dict[Request, int] = {}
        self.ended: dict[Request, int] = {}
        self.requests: list[Request] = []
        self.steps = self.busy_steps = self.computed = 0
        in_flight: deque = deque()
        last_event = max(workload.events)
        while self.steps <= last_event or self.scheduler.has_unfinished() or in_flight:
            for what, number in workload.events.get(self.steps, []):
                if what == "add":
                    self.add(number, workload.wishes[number])
                elif self.scheduler.abort(str(number)):
                    self.ended[next(r for r in self.requests if r.request_id == str(number))] = self.steps
            running = list(self.scheduler.running)
            self.busy_steps += self.scheduler.has_unfinished()
            step = self.scheduler.schedule()
            self.check_victims(running)
            if step is not None:
                self.computed += step.num_query_tokens
                in_flight.append(step)
            while len(in_flight) > (workload.depth if step is not None else 0):
                done = in_flight.popleft()
                places = zip(done.requests, (done.starts + done.num_tokens).tolist(), strict=True)
                for request in self.scheduler.commit(done, np.array([sampled(r.request_id, at) for r, at in places])):
                    self.ended[request] = self.steps
            self.steps += 1
            assert self.steps < 5000

    def add(self, number, wish):
        params = SamplingParams(max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos)
        request = Request.create(
            str(number), number, wish.prompt, params, model_eos=END_TOKENS, engine_seed=0, priority=wish.priority
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.arrived[request] = self.steps

    def check_victims(self, running):
        """The first in order among those who ran is never preempted."""
        if running and self.scheduler.rules.policy == "priority":
            assert min(running, key=urgency) not in self.scheduler.preempted_now
        elif running:
            assert running[0] not in self.scheduler.preempted_now

    def check_preemptions(self):
        """When a request is admitted there is room for all its tokens. What is short later was taken by one before it
        in the order of service (in one of its lives, and no more than it can hold), or went into a new token."""
        order = sorted(self.requests, key=urgency if self.scheduler.rules.policy == "priority" else lambda r: r.arrival)
        taken = 0
        for request in order:
            assert request.num_preemptions <= request.num_output + taken
            taken += -(-request.token_limit // self.scheduler.block_size) * (1 + request.num_preemptions)
        self.check_recomputation()

    def check_recomputation(self):
        """Each preemption loses at most what its request has, and nothing else is ever computed twice."""
        lost = sum(request.num_preemptions * request.token_limit for request in self.requests)
        assert self.scheduler.counters.recomputed_tokens <= lost
        assert self.scheduler.counters.recomputed_tokens == sum(request.num_recomputed for request in self.requests)
        assert self.computed <= sum(r.token_limit for r in self.requests) + self.scheduler.counters.recomputed_tokens


@settings(PROPERTY, max_examples=120)
@given(workloads(running_first=True, aborts=False))
def test_running_first_waiting_is_bounded(workload):
    run = Run(workload, "running_first")
    if workload.rules["policy"] == "fcfs" and workload.depth <= 1:
        free_from = 0
        for request in run.requests:
            # Once all who came before it are gone it is served in each step.
            start = max(run.arrived[request], free_from)
            assert run.ended[request] <= start + request.token_limit + workload.depth
            free_from = max(free_from, run.ended[request] + 1)
    # In each step the first in order gains a token, unless somebody before it in the running queue was preempted.
    # (Whatever it gained in vain, because it was preempted later by one still before it, was recomputed.) A token in
    # flight may keep it from coming back for as long as the loop runs ahead.
    gained = sum(request.token_limit for request in run.requests) + run.scheduler.counters.recomputed_tokens
    preemptions = run.scheduler.counters.preemptions
    lost = sum(request.num_preemptions * request.token_limit for request in run.requests)
    assert run.busy_steps <= gained + lost + (1 + workload.depth) * (preemptions + len(run.requests))


@settings(PROPERTY, max_examples=120)
@given(workloads(running_first=True, aborts=False))
def test_running_first_recomputation_is_bounded(workload):
    workload.rules["reserve_full_prompt"] = True
    if workload.rules["policy"] == "fcfs":
        workload.depth = min(workload.depth, 1)  # further ahead, one who waits for its token is overtaken
    Run(workload, "running_first").check_preemptions()


@settings(PROPERTY, max_examples=120)
@given(workloads(running_first=True))
def test_running_first_ends_with_aborts_too(workload):
    run = Run(workload, "running_first")
    run.check_recomputation()
    assert run.scheduler.pool.num_free == run.scheduler.pool.num_blocks


@PROPERTY
@given(workloads())
def test_prefill_first_waiting_and_recomputation_are_bounded(workload):
    run = Run(workload, "prefill_first")
    run.check_recomputation()
    aborted = run.scheduler.counters.aborted_requests
    assert run.scheduler.counters.preemptions <= sum(r.num_output for r in run.requests) + aborted
    # Each step computes something, or waits for one that is in flight.
    assert run.busy_steps <= (1 + workload.depth) * (run.computed + len(run.requests))


# Case 4: a pool just under two full sequences, chunks smaller than the prompt.


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("chunk", [2, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_case_4_under_running_first(depth, chunk, threshold, policy, caching):
    scheduler = make_scheduler(
        block_size=4,
        num_blocks=10,  # two sequences of 28 tokens need 14; they come one after the other, so 13 would do
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
        scheduling_policy="running_first",
        rules=Rules(policy=policy, long_prefill_token_threshold=threshold),
    )
    requests = [make_request(i, [i] * 12, max_tokens=16, priority=1 - i) for i in range(2)]
    loop = run_all(scheduler, requests, depth)
    assert [request.output_token_ids for request in requests] == [list(range(12, 28))] * 2
    counters = scheduler.counters
    assert 1 <= counters.preemptions <= 2  # it comes back when the other is gone, not for one chunk
    computed = sum(step.num_query_tokens for step in loop.steps)
    assert computed <= 2 * 28 + counters.recomputed_tokens
    assert counters.recomputed_tokens <= sum(r.num_preemptions * r.token_limit for r in requests)


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_case_4_ten_in_a_pool_for_two(depth, reserve):
    scheduler = make_scheduler(
        block_size=2,
        num_blocks=15,
        max_num_batched_tokens=5,
        scheduling_policy="running_first",
        rules=Rules(reserve_full_prompt=reserve),
    )
    requests = [make_request(i, [i] * 6, max_tokens=10) for i in range(10)]
    loop = run_all(scheduler, requests, depth)
    assert all(request.output_token_ids == counted_up(request) for request in requests)
    assert len(loop.steps) <= sum(request.token_limit for request in requests)
