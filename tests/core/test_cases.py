"""What engines of this kind have got wrong in public: cases 1 to 9 of the project's list."""

import numpy as np
import pytest

from jaxvllm.core import PlanLayout, Request, RequestStatus, Rules, fill_plan
from jaxvllm.core.buckets import Bucket
from jaxvllm.sampling_params import SamplingParams
from tests.core.fake_device import FakeEngine, generate
from tests.core.helpers import Loop, count_up, counted_up, make_request, make_scheduler, run_all
from tests.core.workloads import VOCABULARY

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


# 1. A prompt that can never fit the pool.


@DEPTHS
def test_1_a_prompt_larger_than_the_pool_is_refused_with_numbers_and_the_others_go_on(depth):
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    good = [make_request(i, [i] * 5, max_tokens=4) for i in range(3)]
    scheduler.add(good[0])
    with pytest.raises(ValueError, match=r"20 tokens, but the cache holds 16 \(4 blocks of 4\)"):
        scheduler.add(make_request(9, [1] * 20))
    assert scheduler.num_waiting == 1
    run_all(scheduler, good[1:], depth)
    assert [request.output_token_ids for request in good] == [[5, 6, 7, 8]] * 3


@DEPTHS
def test_1_a_prompt_of_exactly_the_pool_is_served(depth):
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    request = make_request(0, list(range(16)), max_tokens=9)
    run_all(scheduler, [request], depth)
    assert (request.output_token_ids, request.finish_reason) == ([16], "length")


# 2. A lone sequence outgrows the pool.


@DEPTHS
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_2_a_lone_sequence_that_outgrows_the_pool_ends_with_length(depth, block_size):
    scheduler = make_scheduler(block_size=block_size, num_blocks=8 // block_size)
    request = make_request(0, [1] * 6, max_tokens=64)
    loop = run_all(scheduler, [request], depth)
    # 8 slots: tokens 6 and 7 are computed, a ninth token is sampled and never needs a slot.
    assert (request.output_token_ids, request.finish_reason) == ([6, 7, 8], "length")
    assert scheduler.counters.preemptions == 0
    assert len(loop.steps) == 3


@DEPTHS
def test_2_two_that_outgrow_the_pool_together_finish_one_after_the_other(depth):
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    requests = [make_request(i, [i] * 6, max_tokens=64) for i in range(2)]
    run_all(scheduler, requests, depth)
    assert all(request.output_token_ids == list(range(6, 17)) for request in requests)


# 3. Prompt lengths around max_model_len.


@DEPTHS
def test_3_prompt_lengths_around_max_model_len(depth):
    scheduler = make_scheduler(max_model_len=20, num_blocks=64)
    fits = make_request(0, [1] * 19, max_tokens=None)
    scheduler.add(fits)
    for length in (20, 21):
        message = f"prompt of {length} tokens, but max_model_len=20 leaves room for 19"
        with pytest.raises(ValueError, match=message):
            scheduler.add(make_request(length, [1] * length))
    assert list(scheduler.waiting) == [fits]
    scheduler.check_integrity()
    normal = make_request(1, [2] * 3, max_tokens=4)
    run_all(scheduler, [normal], depth)
    assert (fits.output_token_ids, fits.finish_reason) == ([19], "length")
    assert normal.output_token_ids == [3, 4, 5, 6]


def test_3_max_tokens_none_goes_to_max_model_len():
    request = make_request(0, [1] * 5, max_tokens=None)
    run_all(make_scheduler(max_model_len=20), [request])
    assert (request.output_token_ids, request.finish_reason) == (list(range(5, 20)), "length")


# 4. A pool just under two full sequences, chunks smaller than the prompt.


@DEPTHS
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("caching", [True, False])
def test_4_recomputation_is_bounded(depth, chunk, caching):
    scheduler = make_scheduler(
        block_size=4,
        num_blocks=13,  # two sequences of 28 tokens need 14
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    )
    requests = [make_request(i, [i] * 12, max_tokens=16) for i in range(2)]
    loop = run_all(scheduler, requests, depth)
    assert [request.output_token_ids for request in requests] == [list(range(12, 28))] * 2
    counters = scheduler.counters
    # The second one comes back when the first one is gone, not for one chunk: once, so it loses at most all once.
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert counters.recomputed_tokens <= requests[1].num_known
    # Whatever is computed is either new or counted as recomputed: nothing is hidden.
    computed = sum(int(step.num_tokens.sum()) for step in loop.steps)
    assert computed == counters.prefill_tokens + counters.decode_tokens
    assert computed <= 2 * 28 + counters.recomputed_tokens
    if depth == 0 and caching:
        assert counters.recomputed_tokens <= 2 * scheduler.block_size


@DEPTHS
def test_4_ten_in_a_pool_for_two(depth):
    scheduler = make_scheduler(block_size=2, num_blocks=15, max_num_batched_tokens=5)
    requests = [make_request(i, [i] * 6, max_tokens=10) for i in range(10)]
    run_all(scheduler, requests, depth)
    assert all(request.output_token_ids == counted_up(request) for request in requests)
    assert all(request.num_preemptions <= request.num_output for request in requests)
    assert scheduler.counters.recomputed_tokens <= sum(r.num_preemptions * r.num_known for r in requests)


# 5. The chunk is cut before the prefix hit is known.


@pytest.mark.parametrize("policy", ["prefill_first", "running_first"])
def test_5_cached_tokens_are_counted_before_the_chunk_is_cut(policy):
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=6, scheduling_policy=policy)
    first = make_request(0, list(range(13)), max_tokens=1)
    run_all(scheduler, [first])
    second = make_request(1, list(range(13)), max_tokens=1)
    loop = run_all(scheduler, [second])
    # 12 of 13 tokens are cached: one token is left, in one step, and not a chunk of 6 of 13.
    assert [(s.starts.tolist(), s.num_tokens.tolist()) for s in loop.steps] == [([12], [1])]
    assert (second.num_cached_tokens, second.output_token_ids) == (12, first.output_token_ids)


def test_5_a_preempted_request_finds_its_full_blocks_and_computes_the_rest():
    scheduler = make_scheduler(block_size=4, num_blocks=7, max_num_batched_tokens=4)
    requests = [make_request(i, [i] * 9, max_tokens=8) for i in range(2)]
    loop = run_all(scheduler, requests)
    assert scheduler.counters.preemptions > 0
    assert any(step.kind == "prefill" and step.starts[0] == 8 for step in loop.steps)
    assert all(request.output_token_ids == counted_up(request) for request in requests)
    assert requests[1].first_cached_tokens == 0 < requests[1].num_cached_tokens


# 6. In a chunk that isn't the last one, nothing is read that isn't written, and nothing is sampled.


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_6_chunks_equal_one_shot(chunk):
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=chunk, max_running=4)
    engine = FakeEngine(scheduler, max_running=4, depth=1)  # its cache is poison until written
    prompt = [i % 3 for i in range(23)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    request = Request.create("0", 0, prompt, params, model_eos=(), engine_seed=0)
    scheduler.add(request)
    while scheduler.has_unfinished() or engine.in_flight:
        engine.step()
    assert request.output_token_ids == generate(prompt, request.seed, 28, set(), VOCABULARY)


def test_6_only_the_last_chunk_samples():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    request = make_request(0, list(range(12)), max_tokens=1)
    scheduler.add(request)
    layout = PlanLayout(Bucket("ragged", 8, 4), scheduler.table_width, max_rows=8, drop_slot=256)
    seen = []
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        assert step is not None
        plan = layout.views(fill_plan(step, scheduler, layout))
        seen.append((step.samples.tolist(), plan.rows[0].item(), plan.context_lens[0].item(), request.status))
        scheduler.commit(step, count_up(step))
        assert request.num_output == len(seen) // 3
    waiting, running = RequestStatus.WAITING, RequestStatus.RUNNING
    assert seen == [([False], 8, 5, waiting), ([False], 8, 10, waiting), ([True], 0, 12, running)]


# 7. A prompt of exactly k blocks, twice.


@DEPTHS
@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 5])
def test_7_a_prompt_of_whole_blocks_twice(depth, num_blocks_of_prompt):
    scheduler = make_scheduler(block_size=4)
    prompt = list(range(4 * num_blocks_of_prompt))
    first, second = make_request(0, prompt, max_tokens=6), make_request(1, prompt, max_tokens=6)
    run_all(scheduler, [first], depth)
    loop = run_all(scheduler, [second], depth)
    assert first.output_token_ids == second.output_token_ids
    assert second.num_cached_tokens == len(prompt) - 4
    assert (loop.steps[0].starts.tolist(), loop.steps[0].num_tokens.tolist()) == ([len(prompt) - 4], [4])


@pytest.mark.parametrize("policy", ["prefill_first", "running_first"])
def test_7_nobody_waits_for_a_block_that_it_has_to_compute_anyway(policy):
    scheduler = make_scheduler(block_size=4, scheduling_policy=policy, rules=Rules(share_prefixes=True))
    requests = [make_request(i, [1, 2, 3, 4], max_tokens=6) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler)
    step = loop.step()
    assert step is not None
    assert (step.requests, step.starts.tolist(), step.num_tokens.tolist()) == (requests, [0, 0], [4, 4])
    loop.drain()
    assert [request.output_token_ids for request in requests] == [list(range(4, 10))] * 2


# 8. X is freed, Y overwrites one of its blocks, X comes again.


def test_8_an_overwritten_block_is_a_miss():
    scheduler = make_scheduler(block_size=4, num_blocks=4)
    x = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    run_all(scheduler, [make_request(0, x, max_tokens=1)])
    assert scheduler.pool.free_blocks() == [3, 2, 1, 0]
    run_all(scheduler, [make_request(1, [40] * 11, max_tokens=1)])  # takes 3, 2 and 1, X's second block
    again = make_request(2, x, max_tokens=1)
    run_all(scheduler, [again])
    assert again.num_cached_tokens == 4
    run_all(scheduler, [make_request(3, [41] * 15, max_tokens=1)])  # takes all four
    once_more = make_request(4, x, max_tokens=1)
    run_all(scheduler, [once_more])
    assert once_more.num_cached_tokens == 0


# 9. Two equal prompts admitted in one step; then one of them is freed.


def test_9_equal_prompts_in_one_step_share_nothing_and_stay_right_when_one_goes():
    scheduler = make_scheduler(block_size=4, num_blocks=8)
    prompt = [1, 2, 3, 4, 5]
    a, b = make_request(0, prompt, max_tokens=6), make_request(1, prompt, max_tokens=6)
    for request in (a, b):
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    # Not published before it is written: the second one computes everything itself.
    assert scheduler.pool.cached_blocks() == []
    assert (step.starts.tolist(), step.num_tokens.tolist()) == ([0, 0], [5, 5])
    assert (a.block_table, b.block_table) == ([0, 1], [2, 3])
    scheduler.commit(step, count_up(step))
    assert scheduler.pool.cached_blocks() == [2]
    scheduler.abort("0")
    assert scheduler.pool.in_use(2)
    assert not scheduler.pool.in_use(0)
    third = make_request(2, prompt, max_tokens=6)
    scheduler.add(third)
    loop = Loop(scheduler)
    loop.step()
    assert (third.block_table[0], third.num_cached_tokens) == (2, 4)
    loop.drain()
    assert b.output_token_ids == third.output_token_ids == [5, 6, 7, 8, 9, 10]
    assert scheduler.pool.num_free == 8


def test_9_a_shared_block_stays_until_its_last_holder_goes():
    scheduler = make_scheduler(block_size=4, num_blocks=6)
    prompt = [1, 2, 3, 4, 5]
    requests = [make_request(i, prompt, max_tokens=8) for i in range(3)]
    loop = Loop(scheduler)
    for request in requests:
        scheduler.add(request)
        loop.step()  # one after the other: block 0 is shared by all three
    assert [request.block_table[0] for request in requests] == [0, 0, 0]
    for request in requests[:2]:
        scheduler.abort(request.request_id)
        scheduler.check_integrity()
        assert scheduler.pool.in_use(0)
        assert 0 not in scheduler.pool.free_blocks()
    other = make_request(3, [40] * 15, max_tokens=1)  # takes every free block there is
    scheduler.add(other)
    loop.step()
    assert 0 not in other.block_table
    assert scheduler.pool.match(np.array([*prompt, 0], np.int32), []) == [0]
    loop.drain()
    assert requests[2].output_token_ids == list(range(5, 13))
    assert scheduler.pool.num_free == 6


def test_9_a_block_is_published_only_when_its_tokens_are_known():
    scheduler = make_scheduler(block_size=4)
    request = make_request(0, [1, 2, 3], max_tokens=9)
    scheduler.add(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    # All four tokens of the block are computed by now on the device, but the host doesn't know the fourth.
    assert (request.num_computed, request.num_known) == (5, 3)
    scheduler.commit(first, np.array([7]))
    assert scheduler.pool.cached_blocks() == []
    scheduler.commit(second, np.array([8]))
    assert scheduler.pool.cached_blocks() == [0]
    assert scheduler.pool.match(np.array([1, 2, 3, 7, 0], np.int32), []) == [0]
