"""A worked preemption: block size 16, six blocks, running [A, B, C]; its three endings, and the way back.

          tokens   blocks      comes to a border: its next token has no slot
    A     33       b0 b1       yes
    B     18       b2 b3       no
    C     33       b4 b5       yes

(The walk is told elsewhere with 17 tokens for A and C, which fill one block and touch a second, and lets them ask for a
third. They would ask for their second. One block further on, at 33, it is right word for word.)
"""

import numpy as np
import pytest

from jaxvllm.core import Request, RequestStatus, Scheduler
from tests.core.helpers import Loop, make_request, make_scheduler, run_all


def three_running(num_blocks: int = 6, **changes) -> tuple[Scheduler, Loop, list[Request]]:
    """A smaller state: A and C have prompts of one block and one output, so they want their second block."""
    scheduler = make_scheduler(block_size=16, num_blocks=num_blocks, max_num_seqs=16, **changes)
    requests = [
        make_request(0, np.arange(16) + 100, max_tokens=40),
        make_request(1, np.arange(17) + 200, max_tokens=40),
        make_request(2, np.arange(16) + 300, max_tokens=40),
    ]
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler)
    loop.step()
    assert [request.num_known for request in requests] == [17, 18, 17]
    return scheduler, loop, requests


def tables(requests) -> list[list[int]]:
    return [request.block_table for request in requests]


def test_a_block_is_taken_when_its_first_token_is_about_to_be_computed():
    scheduler, loop, (a, b, c) = three_running()
    assert tables([a, b, c]) == [[0], [1, 2], [3]]
    assert scheduler.pool.free_blocks() == [4, 5]
    assert scheduler.pool.cached_blocks() == [0, 1, 3]
    loop.step()
    assert tables([a, b, c]) == [[0, 4], [1, 2], [3, 5]]


def test_ending_1_nobody_is_preempted():
    scheduler, loop, (a, b, c) = three_running()
    step = loop.step()
    assert step is not None
    assert (step.requests, step.preempted) == ([a, b, c], [])
    assert tables([a, b, c]) == [[0, 4], [1, 2], [3, 5]]
    assert scheduler.pool.free_blocks() == []


def full_walk() -> tuple[Scheduler, Loop, list[Request]]:
    """The state of the walk: no block is free, and A and C come to a border in the same step."""
    scheduler = make_scheduler(block_size=16, num_blocks=6, max_num_seqs=16, max_num_batched_tokens=256)
    a = make_request(0, np.arange(32) + 100, max_tokens=40)
    b = make_request(1, np.arange(17) + 200, max_tokens=40)
    c = make_request(2, np.arange(32) + 300, max_tokens=40)
    for request in (a, b, c):
        scheduler.add(request)
    loop = Loop(scheduler)
    loop.step()
    assert tables([a, b, c]) == [[0, 1], [2, 3], [4, 5]]
    assert scheduler.pool.free_blocks() == []
    assert [request.num_known for request in (a, b, c)] == [33, 18, 33]
    return scheduler, loop, [a, b, c]


def test_ending_2_the_tail_is_preempted():
    scheduler, loop, (a, b, c) = full_walk()
    step = loop.step()
    assert step is not None
    assert (step.requests, step.preempted) == ([a, b], [c])
    # C's blocks come back last first, so A takes b5, and b4 keeps what it holds.
    assert tables([a, b, c]) == [[0, 1, 5], [2, 3], []]
    assert scheduler.pool.free_blocks() == [4]
    assert (list(scheduler.waiting), scheduler.running) == ([c], [a, b])
    assert (c.status, c.row, c.num_computed, c.num_preemptions) == (RequestStatus.WAITING, -1, 0, 1)
    # What C knows is not lost, only computed state is.
    assert (c.num_known, c.output_token_ids) == (33, [32])


def test_ending_3_oneself_is_preempted():
    scheduler, loop, (a, b, c) = three_running(num_blocks=5)
    # One block is free: A takes it. C needs one too, nobody is behind it, so it goes itself.
    assert scheduler.pool.free_blocks() == [4]
    step = loop.step()
    assert step is not None
    assert (step.requests, step.preempted) == ([a, b], [c])
    assert tables([a, b, c]) == [[0, 4], [1, 2], []]
    assert scheduler.pool.free_blocks() == [3]


def test_who_was_preempted_goes_before_newcomers_and_finds_its_prefix_again():
    scheduler, loop, (a, b, c) = full_walk()
    newcomer = make_request(3, [7] * 5, max_tokens=2)
    scheduler.add(newcomer)  # it would fit into the free block, but C is ahead of it
    loop.step()
    assert list(scheduler.waiting) == [c, newcomer]
    # C needs 3 blocks and 1 is free: it waits, and so does everybody behind it.
    step = loop.step()
    assert step is not None
    assert (step.kind, step.requests) == ("decode", [a, b])
    scheduler.abort(a.request_id)
    # b4, which holds C's first 16 tokens, was not taken meanwhile: only the rest is computed again.
    step = loop.step()
    assert step is not None
    assert (step.kind, step.requests[0]) == ("prefill", c)
    assert c.block_table[0] == 4
    assert (step.starts[0], step.num_tokens[0]) == (16, 17)
    assert (c.num_cached_tokens, c.first_cached_tokens) == (16, 0)
    assert scheduler.counters.recomputed_tokens == 32 - 16
    loop.drain()
    assert c.output_token_ids == list(range(32, 50)) + list(range(22))


def test_the_prefix_is_lost_when_its_block_was_taken():
    scheduler, loop, (a, b, c) = full_walk()
    loop.step()
    # Free list [b4]: whoever takes the next block takes C's prefix.
    while a.num_computed < 48 and b.num_computed < 32:
        assert 4 in scheduler.pool.cached_blocks()
        loop.step()
    loop.step()
    assert 4 not in scheduler.pool.free_blocks()
    assert 4 not in scheduler.pool.cached_blocks()
    scheduler.abort(a.request_id)
    scheduler.abort(b.request_id)
    step = loop.step()
    assert step is not None
    assert (step.requests, step.starts.tolist(), step.num_tokens.tolist()) == ([c], [0], [33])
    assert c.num_cached_tokens == 0
    assert scheduler.counters.recomputed_tokens == 32


def test_several_are_preempted_for_one_block_when_blocks_are_shared():
    # B, C and D hold the same first block; only what is theirs alone comes back when they go.
    scheduler = make_scheduler(block_size=4, num_blocks=6)
    shared = [1, 2, 3, 4]
    first = make_request(0, [9] * 7, max_tokens=9)
    prompts = [[*shared, 10 + i] for i in range(3)]
    scheduler.add(first)
    scheduler.add(make_request(1, prompts[0], max_tokens=9))
    loop = Loop(scheduler)
    loop.step()
    others = [make_request(2, prompts[1], max_tokens=9), make_request(3, prompts[2], max_tokens=9)]
    for request in others:
        scheduler.add(request)
    loop.step()
    assert [request.block_table[0] for request in others] == [2, 2]
    assert scheduler.pool.num_free == 0
    loop.drain()
    assert scheduler.counters.preemptions > 0
    assert all(len(request.output_token_ids) == 9 for request in [first, *others])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_block_size_1(depth):
    """`len % 1 == 1` is never true: the rule must ask for a block for every token all the same."""
    scheduler = make_scheduler(block_size=1, num_blocks=12)
    requests = [make_request(i, [i + 1] * 4, max_tokens=6) for i in range(3)]
    loop = run_all(scheduler, requests, depth)
    assert [request.output_token_ids for request in requests] == [[4, 5, 6, 7, 8, 9]] * 3
    assert scheduler.counters.preemptions > 0
    assert all(step.num_tokens.min() >= 1 for step in loop.steps)


def test_each_token_takes_a_block_at_block_size_1():
    scheduler = make_scheduler(block_size=1, num_blocks=8)
    request = make_request(0, [1, 2, 3], max_tokens=4)
    scheduler.add(request)
    loop = Loop(scheduler)
    held = []
    while scheduler.has_unfinished():
        scheduler_step = scheduler.schedule()
        assert scheduler_step is not None
        held.append(len(request.block_table))
        scheduler.commit(scheduler_step, loop.sample(scheduler_step))
    assert held == [3, 4, 5, 6]  # the fourth output is sampled, never computed


def test_a_preempted_request_with_a_token_in_flight_still_receives_it():
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    a, b = make_request(0, [1] * 7, max_tokens=8), make_request(1, [2] * 7, max_tokens=8)
    for request in (a, b):
        scheduler.add(request)
    first = scheduler.schedule()
    second = scheduler.schedule()  # before the first tokens are known
    assert first is not None
    assert second is not None
    assert (second.kind, [r.num_in_flight for r in (a, b)]) == ("decode", [2, 2])
    scheduler.commit(first, np.array([10, 20]))
    third = scheduler.schedule()  # both need a block, none is free: B goes, its second token is in flight
    assert third is not None
    assert (third.requests, third.preempted) == ([a], [b])
    assert (b.num_known, b.num_in_flight, b.num_tokens) == (8, 1, 9)
    assert scheduler.find_room(b) is None  # not before its token is known
    scheduler.commit(second, np.array([11, 21]))
    assert b.output_token_ids == [20, 21]
    assert (b.num_known, b.num_in_flight) == (9, 0)
    # A's block 1 was filled by the second step and is published; B's block 3, filled too, is A's by now.
    assert a.block_table == [0, 1, 3]
    assert scheduler.pool.cached_blocks() == [0, 1, 2]
    scheduler.check_integrity()


def test_a_request_may_finish_while_it_waits():
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    a, b = make_request(0, [1] * 7, max_tokens=8), make_request(1, [2] * 7, max_tokens=8)
    for request in (a, b):
        scheduler.add(request)
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert all(steps)
    scheduler.commit(steps[0], np.array([10, 20]))  # type: ignore[arg-type]
    steps.append(scheduler.schedule())
    assert list(scheduler.waiting) == [b]
    assert scheduler.commit(steps[1], np.array([11, 90])) == [b]  # type: ignore[arg-type]
    assert (b.status, b.finish_reason, b.output_token_ids) == (RequestStatus.FINISHED, "stop", [20, 90])
    assert not scheduler.waiting
    scheduler.check_integrity()
