"""The table at the end of the seed on scheduling: nano-vLLM's column is prefill_first, vLLM's running_first.

Each test is named after its row and shows both columns where both have something to show.
"""

from typing import Any

import numpy as np
import pytest

from jaxvllm.core import RequestStatus, Rules
from tests.core.helpers import Loop, counted_up, make_request, make_scheduler, run_all


def loop_of(policy="running_first", rules=None, depth=0, **changes) -> Loop:
    return Loop(make_scheduler(scheduling_policy=policy, rules=Rules(**(rules or {})), **changes), depth=depth)


def add(loop, *requests) -> Any:
    for request in requests:
        loop.scheduler.add(request)
    return requests


def served(step) -> dict[str, tuple[int, int]]:
    """{request id: (computed before, tokens)} of a step."""
    ids = [request.request_id for request in step.requests]
    return dict(zip(ids, zip(step.starts.tolist(), step.num_tokens.tolist(), strict=True), strict=True))


def test_core_abstraction_computed_tokens_catch_up_with_known_ones():
    """核心抽象: no phases. Prompt, decoded and recomputed tokens are all num_tokens - num_computed."""
    loop = loop_of(max_num_batched_tokens=8)
    (request,) = add(loop, make_request(0, list(range(20)), max_tokens=3))
    gaps = []
    while loop.scheduler.has_unfinished():
        gap = request.num_tokens - request.num_computed
        step = loop.step()
        assert step is not None
        assert step.num_tokens.tolist() == [min(gap, 8)]
        gaps.append(gap)
    assert gaps == [20, 12, 4, 1, 1]


def test_order_of_the_two_passes_running_before_waiting():
    """两个循环的顺序: prefill_first serves who waits first, running_first who runs."""
    first = {}
    for policy in ("prefill_first", "running_first"):
        loop = loop_of(policy)
        add(loop, make_request(0, [1] * 5))
        loop.step()
        add(loop, make_request(1, [2] * 5))
        step = loop.step()
        assert step is not None
        first[policy] = step.requests[0].request_id
    assert first == {"prefill_first": "1", "running_first": "0"}


def test_mixed_batches_decode_rows_beside_prompt_chunks():
    """能否混批: a newcomer stops decoding under prefill_first; under running_first one step has both."""
    seen = {}
    for policy in ("prefill_first", "running_first"):
        loop = loop_of(policy)
        add(loop, make_request(0, [1] * 5))
        loop.step()
        add(loop, make_request(1, [2] * 7))
        step = loop.step()
        assert step is not None
        seen[policy] = (step.kind, served(step))
    assert seen["prefill_first"] == ("prefill", {"1": (0, 7)})
    assert seen["running_first"] == ("mixed", {"0": (5, 1), "1": (0, 7)})


def test_token_budget_decode_rows_cost_too():
    """token 预算: one budget through both passes; decode takes from it."""
    loop = loop_of(max_num_batched_tokens=6)
    add(loop, *(make_request(i, [i] * 2) for i in range(3)))
    loop.step()
    add(loop, make_request(3, [3] * 9))
    step = loop.step()
    assert step is not None
    assert served(step) == {"0": (2, 1), "1": (2, 1), "2": (2, 1), "3": (0, 3)}
    loop.drain()
    assert max(step.num_query_tokens for step in loop.steps) == 6
    # prefill_first doesn't look at it when it decodes.
    loop = loop_of("prefill_first", max_num_batched_tokens=2)
    add(loop, *(make_request(i, [i] * 2) for i in range(3)))
    loop.drain()
    assert max(step.num_query_tokens for step in loop.steps) == 3


def test_who_may_be_cut_into_chunks_anyone():
    """谁能被切块: only the first of its step, against anyone."""
    seen = {}
    for policy in ("prefill_first", "running_first"):
        loop = loop_of(policy, max_num_batched_tokens=10)
        add(loop, make_request(0, [1] * 6), make_request(1, [2] * 6))
        step = loop.step()
        assert step is not None
        seen[policy] = served(step)
    assert seen["prefill_first"] == {"0": (0, 6)}
    assert seen["running_first"] == {"0": (0, 6), "1": (0, 4)}


def test_who_may_be_cut_into_chunks_nobody_without_chunked_prefill():
    """... 只有显式关掉 enable_chunked_prefill 才不切."""
    loop = loop_of(rules={"enable_chunked_prefill": False}, max_num_batched_tokens=10, max_model_len=11)
    add(loop, make_request(0, [1] * 6, max_tokens=3), make_request(1, [2] * 6, max_tokens=3))
    assert [served(step) for step in (loop.step(), loop.step())] == [{"0": (0, 6)}, {"0": (6, 1), "1": (0, 6)}]
    loop.drain()
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=10 must be at least 11"):
        make_scheduler(
            scheduling_policy="running_first",
            rules=Rules(enable_chunked_prefill=False),
            max_num_batched_tokens=10,
            max_model_len=12,
        )


def test_limit_of_one_request_long_prefill_token_threshold():
    """单条限流: no request gets more in one step, so others get a share."""
    loop = loop_of(rules={"long_prefill_token_threshold": 4}, max_num_batched_tokens=10)
    add(loop, make_request(0, [1] * 9), make_request(1, [2] * 3), make_request(2, [3] * 9))
    assert [served(step) for step in (loop.step(), loop.step())] == [
        {"0": (0, 4), "1": (0, 3), "2": (0, 3)},
        {"0": (4, 4), "1": (3, 1), "2": (3, 4)},
    ]
    with pytest.raises(ValueError, match=r"long_prefill_token_threshold=4 is not for .*'prefill_first'"):
        make_scheduler(rules=Rules(long_prefill_token_threshold=4))


def test_granularity_of_allocation_the_chunk_at_hand():
    """块的分配粒度: the whole prompt's blocks at once, against those of each chunk."""
    held = {}
    for policy in ("prefill_first", "running_first"):
        loop = loop_of(policy, max_num_batched_tokens=8)
        (request,) = add(loop, make_request(0, [1] * 20))
        held[policy] = []
        for _ in range(3):
            loop.step()
            held[policy].append(len(request.block_table))
    assert held == {"prefill_first": [5, 5, 5], "running_first": [2, 4, 5]}


@pytest.mark.parametrize("reserve", [True, False])
def test_granularity_of_allocation_admission_looks_at_the_whole_prompt_if_reserved(reserve):
    """... 除非开 scheduler_reserve_full_isl."""
    loop = loop_of(rules={"reserve_full_prompt": reserve}, num_blocks=6, max_num_batched_tokens=8)
    add(loop, make_request(0, [1] * 7, max_tokens=9))
    loop.step()
    (big,) = add(loop, make_request(1, [2] * 20))  # 5 blocks; 4 are free
    step = loop.step()
    assert step is not None
    assert (big in step.requests) == (not reserve)
    assert len(big.block_table) == (0 if reserve else 2)


def test_interface_of_does_it_fit_nothing_changes_when_it_does_not():
    """「装得下吗」的接口: one question, and only a yes changes anything."""
    loop = loop_of(num_blocks=3, max_num_batched_tokens=12)
    add(loop, make_request(0, [1] * 7, max_tokens=2))
    loop.step()
    scheduler = loop.scheduler
    (big,) = add(loop, make_request(1, [1] * 10))
    before = (scheduler.pool.free_blocks(), scheduler.pool.cached_blocks())
    cached = scheduler.find_prefix(big)
    assert (cached, scheduler.has_room(10, cached)) == ([0], False)
    assert (scheduler.pool.free_blocks(), scheduler.pool.cached_blocks()) == before
    assert (big.row, big.block_table, big.status) == (-1, [], RequestStatus.WAITING)


def test_who_cannot_go_now_is_skipped_while_it_runs():
    """某条排不上时: 「暂时轮不到这条」跳过继续. A's last token is on its way: it has nothing to do, B goes on."""
    loop = loop_of(depth=1)
    a, b = add(loop, make_request(0, [1] * 3, max_tokens=2), make_request(1, [2] * 3, max_tokens=9))
    steps = [loop.step() for _ in range(3)]
    assert [step.requests for step in steps if step] == [[a, b], [a, b], [b]]


def test_who_cannot_go_now_is_skipped_while_it_waits():
    """... waiting 循环挪进 skipped_waiting. A victim that waits for its token lets a newcomer pass."""
    loop = loop_of(num_blocks=4, max_num_batched_tokens=32)
    a, b = add(loop, make_request(0, [1] * 7, max_tokens=8), make_request(1, [2] * 7, max_tokens=8))
    scheduler = loop.scheduler
    steps: list[Any] = [scheduler.schedule(), scheduler.schedule()]
    scheduler.commit(steps[0], np.array([10, 20]))
    steps.append(scheduler.schedule())
    assert steps[2].requests == [a]  # A takes B's block; B's second token is in flight
    (newcomer,) = add(loop, make_request(2, [3] * 2, max_tokens=1))
    step: Any = scheduler.schedule()
    assert step.requests == [a, newcomer]
    assert list(scheduler.waiting) == [b]


def test_true_exhaustion_stops_nobody_overtakes():
    """... 「资源真耗尽」才 break."""
    loop = loop_of(num_blocks=4)
    add(loop, make_request(0, [1] * 5))
    loop.step()
    big, small = add(loop, make_request(1, [2] * 12), make_request(2, [3]))
    step = loop.step()
    assert step is not None
    assert [request.request_id for request in step.requests] == ["0"]
    assert list(loop.scheduler.waiting) == [big, small]


def three_at_a_border(policy: str) -> tuple[Loop, list]:
    """Three requests that fill 6 blocks of 4; each wants another block in the next step."""
    loop = loop_of(rules={"policy": policy}, num_blocks=6, max_num_batched_tokens=32, enable_prefix_caching=False)
    requests = add(loop, *(make_request(i, [i] * 8, priority=(1, 2, 0)[i], max_tokens=4) for i in range(3)))
    loop.step()
    assert loop.scheduler.pool.num_free == 0
    return loop, list(requests)


def test_whom_to_preempt_the_last_running_or_the_least_urgent():
    """抢占挑谁: running.pop() under fcfs, the largest (priority, arrival) under priority."""
    loop, (a, b, c) = three_at_a_border("fcfs")
    step = loop.step()
    assert step is not None
    assert (step.preempted, step.requests) == ([c], [a, b])
    loop, (a, b, c) = three_at_a_border("priority")
    step = loop.step()
    assert step is not None
    assert (step.preempted, step.requests) == ([b], [c, a])


def test_whom_to_preempt_equal_priorities_the_later_arrival():
    loop = loop_of(rules={"policy": "priority"}, num_blocks=4, max_num_batched_tokens=32)
    _, late = add(loop, make_request(0, [0] * 8), make_request(1, [1] * 8))
    loop.step()
    step = loop.step()
    assert step is not None
    assert step.preempted == [late]


def test_whom_to_preempt_one_that_has_its_tokens_gives_them_back():
    """Under priority the victim may be scheduled already: its token returns to the budget."""
    loop = loop_of(rules={"policy": "priority"}, num_blocks=4, max_num_batched_tokens=32)
    (low,) = add(loop, make_request(0, [0] * 5, priority=9))
    loop.step()
    (high,) = add(loop, make_request(1, [1] * 7, priority=0))
    assert [served(loop.step()) for _ in range(2)] == [{"0": (5, 1), "1": (0, 7)}, {"0": (6, 1), "1": (7, 1)}]
    step = loop.step()  # low has a slot left and is served; then high wants a block
    assert step is not None
    assert (step.preempted, step.requests) == ([low], [high])
    assert low.num_tokens == 8  # nothing was sampled for it in this step


def test_whom_to_preempt_itself_and_the_step_may_be_empty():
    loop = loop_of(rules={"policy": "priority"}, num_blocks=4, max_num_batched_tokens=32)
    (low,) = add(loop, make_request(0, [0] * 6, priority=9))
    loop.step()
    (high,) = add(loop, make_request(1, [1] * 6, priority=0))
    assert [len(served(loop.step())) for _ in range(2)] == [2, 2]
    assert loop.step() is None  # low is first, lacks a block, and is the least urgent
    assert loop.scheduler.preempted_now == [low]
    step = loop.step()
    assert step is not None
    assert step.requests == [high]
    loop.drain()
    assert [low.output_token_ids, high.output_token_ids] == [counted_up(low), counted_up(high)]


def test_how_to_preempt_by_recomputation():
    """抢占方式: all blocks go, computed tokens become 0, sampled ones stay; to the head of the queue."""
    loop, (a, b, c) = three_at_a_border("fcfs")
    (newcomer,) = add(loop, make_request(3, [3]))
    loop.step()
    assert (c.block_table, c.num_computed, c.output_token_ids) == ([], 0, [8])
    assert list(loop.scheduler.waiting) == [c, newcomer]
    loop.drain()
    assert all(request.output_token_ids == counted_up(request) for request in (a, b, c))


def test_how_to_preempt_resumes_from_the_prefix_that_survived():
    loop = loop_of(num_blocks=5, max_num_batched_tokens=32)
    a, b = add(loop, make_request(0, [0] * 8, max_tokens=5), make_request(1, [1] * 8, max_tokens=5))
    loop.drain()
    assert a.num_preemptions == 0
    assert (b.num_preemptions, b.num_cached_tokens) == (1, 8)
    assert b.output_token_ids == counted_up(b)


def test_after_a_preemption_nobody_is_admitted_in_that_step():
    """抢占后本轮: the blocks it left are for those who run, though the newcomer would fit."""
    loop, _ = three_at_a_border("fcfs")
    (newcomer,) = add(loop, make_request(3, [3]))
    assert loop.scheduler.num_running == 3
    step = loop.step()
    assert step is not None
    assert step.preempted
    assert newcomer not in step.requests


def test_after_a_preemption_the_victim_does_not_come_back_in_that_step():
    """抢占后本轮: not even where a first chunk is room enough, of which there is some left."""
    options = {"block_size": 4, "num_blocks": 6, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    loop = loop_of(rules={"reserve_full_prompt": False}, **options)
    a, b = add(loop, make_request(0, [1] * 8), make_request(1, [2] * 16))
    loop.step()
    loop.scheduler.max_num_batched_tokens = 8  # a chunk of two blocks
    step = loop.step()
    assert step is not None
    assert (step.requests, step.preempted) == ([a], [b])
    assert loop.scheduler.pool.num_free == 3


def test_where_max_num_seqs_is_checked():
    """max_num_seqs 检查位置: it bounds a step of prefill_first, the running set of running_first."""
    largest = {}
    for policy in ("prefill_first", "running_first"):
        loop = loop_of(policy, max_num_seqs=2)
        add(loop, *(make_request(i, [i] * 3, max_tokens=6) for i in range(5)))
        largest[policy] = 0
        while loop.scheduler.has_unfinished():
            step = loop.step()
            assert step is not None
            assert len(step.requests) <= 2
            largest[policy] = max(largest[policy], loop.scheduler.num_running)
    assert largest == {"prefill_first": 5, "running_first": 2}


def test_the_waiting_queue_by_arrival_or_by_priority():
    """等待队列: FCFS and PRIORITY are exchangeable; a more urgent newcomer displaces nobody who runs."""
    for policy, expected in (("fcfs", ["0", "1", "2", "3"]), ("priority", ["3", "1", "0", "2"])):
        scheduler = make_scheduler(scheduling_policy="running_first", rules=Rules(policy=policy), max_num_seqs=1)
        running = make_request(9, [9], max_tokens=3, priority=5)
        scheduler.add(running)
        loop = Loop(scheduler)
        loop.step()
        add(loop, *(make_request(i, [i], max_tokens=1, priority=(2, 1, 2, -1)[i]) for i in range(4)))
        assert [request.request_id for request in scheduler.waiting] == expected
        loop.drain()
        assert [request.request_id for request in loop.finished] == ["9", *expected]


def test_the_free_list_keeps_known_blocks_longest():
    """Not in the table, but part of the difference: see tests/traces_v1/README.md, prefix caching."""
    order = {}
    for policy in ("prefill_first", "running_first"):
        scheduler = make_scheduler(scheduling_policy=policy, num_blocks=6)
        run_all(scheduler, [make_request(0, [1] * 10, max_tokens=1)])  # blocks 0, 1 full, 2 not
        order[policy] = scheduler.pool.free_blocks()
    assert order == {"prefill_first": [3, 4, 5, 2, 1, 0], "running_first": [2, 3, 4, 5, 1, 0]}
