"""share_prefixes: a request waits while another one computes blocks that it could use."""

import pytest

from jaxvllm.core import Rules
from tests.core.helpers import Loop, make_request, make_scheduler

STEM = list(range(16))
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
POLICIES = pytest.mark.parametrize("policy", ["prefill_first", "running_first"])


def sharing(policy="running_first", depth=0, share=True, **changes) -> Loop:
    config = {"scheduling_policy": policy, "rules": Rules(share_prefixes=share), "max_num_batched_tokens": 128}
    return Loop(make_scheduler(**{**config, **changes}), depth=depth)


def computed(loop) -> int:
    return sum(step.num_query_tokens for step in loop.steps if step.kind != "decode")


@DEPTHS
@POLICIES
@pytest.mark.parametrize("share", [True, False])
def test_two_new_requests_compute_their_common_prefix_once(policy, depth, share):
    loop = sharing(policy, depth, share)
    requests = [make_request(i, [*STEM, 30 + i, 31], max_tokens=4) for i in range(4)]
    for request in requests:
        loop.scheduler.add(request)
    loop.drain()
    assert all(request.output_token_ids == [18, 19, 20, 21] for request in requests)
    hits = [request.first_cached_tokens for request in requests]
    assert hits == ([0, 16, 16, 16] if share else [0] * 4)
    assert loop.scheduler.counters.prefill_tokens == (18 + 3 * 2 if share else 4 * 18)
    # prefill_first keeps its queue in order, so only the head of it ever waits.
    waits = 3 if policy == "running_first" else 1
    assert loop.scheduler.counters.prefix_waits == (waits if share else 0)


def test_nobody_behind_waits_with_it():
    loop = sharing()
    for i, prompt in enumerate(([*STEM, 1], [*STEM, 2], [7] * 5)):
        loop.scheduler.add(make_request(i, prompt))
    step = loop.step()
    assert step is not None
    assert [request.request_id for request in step.requests] == ["0", "2"]
    assert [request.request_id for request in loop.scheduler.waiting] == ["1"]
    step = loop.step()
    assert step is not None
    assert [request.request_id for request in step.requests] == ["0", "2", "1"]
    assert (step.starts[2], step.num_tokens[2]) == (16, 1)


def test_it_waits_for_all_chunks_of_the_writer():
    loop = sharing(max_num_batched_tokens=8)
    a, b = (make_request(i, [*STEM, 30 + i], max_tokens=2) for i in range(2))
    for request in (a, b):
        loop.scheduler.add(request)
    loop.drain()
    assert [(step.requests, step.num_tokens.tolist()) for step in loop.steps[:3]] == [
        ([a], [8]),
        ([a], [8]),
        ([a, b], [1, 1]),
    ]


@DEPTHS
@POLICIES
@pytest.mark.parametrize("how", ["abort", "preempt", "reset"])
def test_a_writer_that_stops_is_waited_for_no_longer(policy, depth, how):
    loop = sharing(policy, depth)
    scheduler = loop.scheduler
    a, b = (make_request(i, [*STEM, 30 + i], max_tokens=2) for i in range(2))
    for request in (a, b):
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    assert step.requests == [a]
    if how == "abort":
        scheduler.abort("0")
    elif how == "preempt":
        scheduler.preempt(a)
    else:
        scheduler.reset_prefix_cache()
    loop.in_flight.append((step, loop.sample(step)))
    step = loop.step()
    if how != "preempt":  # a victim is ahead of it, and may have to wait for its token
        assert step is not None
        assert b in step.requests
    loop.drain()
    assert b.output_token_ids == [17, 18]


def test_a_second_wait_is_for_a_longer_prefix_only():
    loop = sharing(max_num_batched_tokens=32)
    a = make_request(0, [*STEM, 1], max_tokens=9)
    b = make_request(1, [*STEM, *range(20, 28), 2], max_tokens=9)
    c = make_request(2, [*STEM, *range(20, 28), 3], max_tokens=9)
    for request in (a, b, c):
        loop.scheduler.add(request)
    served = [[request.request_id for request in loop.step().requests] for _ in range(3)]  # type: ignore[union-attr]
    assert served == [["0"], ["0", "1"], ["0", "1", "2"]]  # c waits for a's blocks, then for b's
    assert (b.num_cached_tokens, c.num_cached_tokens) == (16, 24)
    assert loop.scheduler.counters.prefix_waits == 3


def test_without_a_prefix_cache_nobody_waits():
    loop = sharing(enable_prefix_caching=False)
    for i in range(2):
        loop.scheduler.add(make_request(i, STEM))
    step = loop.step()
    assert step is not None
    assert len(step.requests) == 2


@DEPTHS
@POLICIES
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_their_prompt_whatever_the_rules_say(policy, depth, caching):
    """The n samples of one request: full blocks are computed once; without prefix caching each computes all."""
    loop = sharing(policy, depth, share=False, enable_prefix_caching=caching)
    requests = [make_request(i, [*STEM, 31], max_tokens=4) for i in range(3)]
    for request in requests:
        request.has_siblings = True
        loop.scheduler.add(request)
    loop.drain()
    assert all(request.output_token_ids == [17, 18, 19, 20] for request in requests)
    assert loop.scheduler.counters.prefill_tokens == (17 + 2 if caching else 3 * 17)


def test_a_restarted_request_begins_anew():
    """Running, between two chunks and waiting: no outputs, no blocks, no hash of what it had said; the order stays."""
    loop = sharing("prefill_first", max_num_batched_tokens=8, num_blocks=16)
    requests = [make_request(0, [7] * 4, 20), make_request(1, STEM, 4), make_request(2, [9] * 4, 4)]
    scheduler = loop.scheduler
    scheduler.add(requests[0])
    for _ in range(12):
        loop.step()
    for request in requests[1:]:
        scheduler.add(request)
    loop.step()
    assert [request.row >= 0 for request in requests] == [True, True, False] and requests[0].num_output == 12
    for request in reversed(requests):
        scheduler.restart(request)
        scheduler.check_integrity()
    scheduler.reset_prefix_cache()
    assert scheduler.pool.num_free == 16 and [len(request.block_hashes) for request in requests] <= [1, 4, 1]
    assert list(scheduler.waiting) == requests and not any(request.num_output for request in requests)
    assert loop.drain()[0] in requests
    assert [request.output_token_ids for request in requests] == [
        [n % 50 for n in range(4, 24)],
        [16, 17, 18, 19],
        [4, 5, 6, 7],
    ]


def test_a_stop_string_ends_it_wherever_it_stands():
    loop = sharing()
    request, last = make_request(0, STEM, 9), make_request(1, [1, 2], 1)
    for one in (request, last):
        loop.scheduler.add(one)
    loop.step()
    for one in (request, last):
        loop.scheduler.stop(one, "text")
        assert (one.finish_reason, one.stop_reason) == ("stop", "text")
    assert loop.scheduler.pool.num_free == 64 and loop.scheduler.counters.finished_requests == 2
