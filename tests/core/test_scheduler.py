"""The scheduler's borders: ids, rows, limits, configuration, the order of commits, and a forgotten prefix cache."""

import numpy as np
import pytest

from tests.core.helpers import Loop, count_up, counted_up, make_request, make_scheduler, run_all


def test_ids_are_unique_among_the_unfinished_and_free_again_afterwards():
    scheduler = make_scheduler()
    request = make_request(0, [1, 2, 3], max_tokens=2)
    scheduler.add(request)
    with pytest.raises(ValueError, match="request '0' is already being served"):
        scheduler.add(make_request(0, [1, 2], max_tokens=2))
    Loop(scheduler).drain()
    with pytest.raises(ValueError, match="request '0' is FINISHED already"):
        scheduler.add(request)
    run_all(scheduler, [make_request(0, [1, 2], max_tokens=2)])


def test_an_empty_prompt_is_refused_by_the_scheduler_too():
    request = make_request(0, [1, 2, 3])
    request.prompt_token_ids = request.prompt_token_ids[:0]
    with pytest.raises(ValueError, match="request '0' has an empty prompt"):
        make_scheduler().add(request)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("num_blocks", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("max_running", 0),
        ("scheduling_policy", "fastest"),
    ],
)
def test_configuration_errors_name_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        make_scheduler(**{field: value})


def test_ten_thousand_requests_at_once():
    scheduler = make_scheduler(block_size=4, num_blocks=40, max_running=8)
    requests = [make_request(i, [i % 7, 1, 2], max_tokens=1) for i in range(10_000)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(step, count_up(step))
    assert all(request.output_token_ids == [3] for request in requests)
    assert scheduler.pool.num_free == 40


def test_rows_bound_the_running_set_only_when_asked():
    for max_running, most in ((3, 3), (None, 9)):
        scheduler = make_scheduler(max_running=max_running, max_num_seqs=2)
        loop = Loop(scheduler)
        for i in range(9):
            scheduler.add(make_request(i, [i] * 2, max_tokens=12))
        running = []
        while scheduler.has_unfinished():
            loop.step()
            running.append(scheduler.num_running)
            assert len(loop.steps[-1].requests) <= 2
        assert max(running) == most


def test_more_running_than_the_arrays_began_with():
    """Without max_running the rows double; nobody's numbers may be lost."""
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=64)
    requests = [make_request(i, [i] * (1 + i % 5), max_tokens=20) for i in range(50)]
    run_all(scheduler, requests)
    assert scheduler.rows.num_rows == 64
    assert all(request.output_token_ids == counted_up(request) for request in requests)


def test_nothing_to_do_and_waiting_for_tokens_are_none():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    request = make_request(0, [1, 2], max_tokens=1)
    scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.schedule() is None  # its only token is in flight: never dispatched past a known limit
    assert scheduler.commit(step, np.array([5])) == [request]
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished()


def test_commits_come_in_order():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, [1, 2], max_tokens=5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="step 1 committed before step 0"):
        scheduler.commit(second, np.array([5]))
    with pytest.raises(AssertionError, match="2 tokens for a step of 1 requests"):
        scheduler.commit(first, np.array([5, 6]))


def test_new_weights_never_meet_old_blocks():
    """Case 21, the host's half: after a reset, a request admitted before it publishes nothing."""
    scheduler = make_scheduler(block_size=2)
    old = make_request(0, [1, 2, 3, 4, 5], max_tokens=6)
    scheduler.add(old)
    loop = Loop(scheduler)
    loop.step()
    assert scheduler.pool.cached_blocks() == [0, 1]
    scheduler.reset_prefix_cache()
    loop.step()
    new = make_request(1, [1, 2, 3, 4, 5], max_tokens=1)
    scheduler.add(new)
    loop.step()
    assert new.num_cached_tokens == 0
    loop.drain()
    # Old and new blocks in one chain would be found here: only the new request's first two are.
    found = scheduler.pool.match(old.known_tokens(), [])
    assert found == scheduler.pool.cached_blocks()
    assert len(found) == 2
