"""Case 11: abort while waiting, between chunks, running, in flight, preempted, twice, and for an unknown id."""

import numpy as np
import pytest

from jaxvllm.core import Request, RequestStatus, Scheduler
from tests.core.helpers import Loop, make_request, make_scheduler


def aborting(when: str) -> tuple[Scheduler, Loop, Request, Request]:
    """A scheduler with a victim in the state `when`, a bystander, and a step in flight if it says so."""
    depth = 1 if when == "in flight" else 0
    scheduler = make_scheduler(block_size=4, num_blocks=16, max_num_batched_tokens=6)
    victim, bystander = make_request(0, list(range(15)), 9), make_request(1, [3] * 4, 5)
    scheduler.add(victim)
    scheduler.add(bystander)
    loop = Loop(scheduler, depth=depth)
    for _ in range({"waiting": 0, "between chunks": 2, "running": 5, "in flight": 5}[when]):
        loop.step()
    return scheduler, loop, victim, bystander


@pytest.mark.parametrize("when", ["waiting", "between chunks", "running", "in flight"])
def test_11_abort(when):
    scheduler, loop, victim, bystander = aborting(when)
    expected = {
        "waiting": (RequestStatus.WAITING, False, 0),
        "between chunks": (RequestStatus.WAITING, True, 0),
        "running": (RequestStatus.RUNNING, True, 0),
        "in flight": (RequestStatus.RUNNING, True, 1),
    }[when]
    assert (victim.status, victim.row >= 0, victim.num_in_flight) == expected
    known = victim.output_token_ids
    assert scheduler.abort("0") is victim
    scheduler.check_integrity()
    assert (victim.status, victim.finish_reason, victim.row) == (RequestStatus.FINISHED, "abort", -1)
    assert (victim.block_table, victim.output_token_ids, victim.num_in_flight) == ([], known, 0)
    assert scheduler.abort("0") is None  # twice
    assert scheduler.abort("nobody") is None
    assert loop.drain() == [bystander]
    assert bystander.output_token_ids == [4, 5, 6, 7, 8]
    assert victim.output_token_ids == known  # a token in flight was discarded
    assert scheduler.counters.discarded_tokens == (1 if when == "in flight" else 0)
    assert scheduler.pool.num_free == 16
    assert (scheduler.counters.aborted_requests, scheduler.counters.finished_requests) == (1, 1)


def test_11_abort_while_preempted():
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    a, b = make_request(0, [1] * 7, max_tokens=8), make_request(1, [2] * 7, max_tokens=8)
    loop = Loop(scheduler, depth=1)
    for request in (a, b):
        scheduler.add(request)
    while not b.num_preemptions:
        loop.step()
    scheduler.abort("1")
    assert loop.drain() == [a]
    assert (b.finish_reason, scheduler.pool.num_free) == ("abort", 4)


def test_11_the_row_of_an_aborted_request_serves_the_next_at_once():
    scheduler = make_scheduler(max_running=1)
    a, b = make_request(0, [1] * 3, max_tokens=8), make_request(1, [2] * 3, max_tokens=3)
    for request in (a, b):
        scheduler.add(request)
    first = scheduler.schedule()
    assert first is not None
    assert first.requests == [a]
    scheduler.abort("0")
    second = scheduler.schedule()
    assert second is not None
    assert (second.requests, second.rows.tolist()) == ([b], first.rows.tolist())
    # The old holder's token comes late and must not reach the new one.
    assert scheduler.commit(first, np.array([77])) == []
    assert (a.output_token_ids, b.output_token_ids) == ([], [])
    scheduler.commit(second, np.array([55]))
    assert b.output_token_ids == [55]
