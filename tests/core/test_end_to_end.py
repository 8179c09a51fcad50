"""Scheduler and plan drive a fake device: each request gets the tokens that it would get alone, without any
cache.

This is what the host room is for, so it is tested as a whole: any pool, budget and batch, preempted or not,
from the prefix cache or not, at any depth of running ahead. Async equals sync because both equal the
oracle.
"""

import numpy as np
import pytest
from hypothesis import given

from jaxvllm.core import Request, Rules, Scheduler
from jaxvllm.sampling_params import SamplingParams
from tests.core.fake_device import FakeEngine, generate
from tests.core.helpers import PROPERTY, make_scheduler
from tests.core.workloads import END_TOKENS, VOCABULARY, Workload, workloads


def make(number: int, workload: Workload) -> Request:
    wish = workload.wishes[number]
    params = SamplingParams(max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos)
    return Request.create(
        str(number), number, wish.prompt, params, model_eos=END_TOKENS, engine_seed=3, priority=wish.priority
    )


def alone(request: Request) -> list[int]:
    prompt = request.prompt_token_ids.tolist()
    return generate(prompt, request.seed, request.token_limit, set(request.eos_token_ids), VOCABULARY)


def drive(workload: Workload, depth: int, policy: str = "prefill_first") -> tuple[FakeEngine, list[Request]]:
    """Run a workload to its end; the engine, and the requests by number."""
    max_running = workload.config["max_running"] or 5
    config = {**workload.config, "max_running": max_running, "rules": Rules(**workload.rules)}
    engine = FakeEngine(make_scheduler(**config, scheduling_policy=policy), max_running, depth)
    requests = [make(number, workload) for number in range(len(workload.wishes))]
    last_event, number = max(workload.events), 0
    while number <= last_event or engine.scheduler.has_unfinished() or engine.in_flight:
        for what, request in workload.events.get(number, []):
            if what == "add":
                engine.scheduler.add(requests[request])
            elif what == "abort":
                engine.scheduler.abort(str(request))
            else:
                engine.scheduler.reset_prefix_cache()
        engine.step()
        number += 1
        assert number < 2000
    return engine, requests


@PROPERTY
@given(workloads(resets=True))
def test_everybody_gets_the_tokens_that_they_get_alone(workload):
    engine, requests = drive(workload, workload.depth)
    check_outputs(engine, requests, workload)
    check_recomputation_is_bounded(engine.scheduler, requests)


@PROPERTY
@given(workloads(resets=True, running_first=True, share=True))
def test_running_first_with_shared_prefixes_too(workload):
    engine, requests = drive(workload, workload.depth, "running_first")
    check_outputs(engine, requests, workload)


@PROPERTY
@given(workloads(resets=True, share=True))
def test_prefill_first_with_shared_prefixes_too(workload):
    engine, requests = drive(workload, workload.depth)
    check_outputs(engine, requests, workload)
    check_recomputation_is_bounded(engine.scheduler, requests)


def check_outputs(engine: FakeEngine, requests: list[Request], workload: Workload) -> None:
    for request in requests:
        got, expected = request.output_token_ids, alone(request)
        if request.finish_reason == "abort":
            assert got == expected[: len(got)]
            assert len(got) < len(expected)
        else:
            assert got == expected
            assert request.finish_reason == ("stop" if got[-1] in request.eos_token_ids else "length")
    assert engine.scheduler.pool.num_free == workload.config["num_blocks"]
    assert not engine.scheduler.pool._expected._writer
    assert not engine.scheduler.pool._expected._hashes


def check_recomputation_is_bounded(scheduler: Scheduler, requests: list[Request]) -> None:
    """Each admission leads to a new token before its request can be preempted again, so there are at most
    as many preemptions as outputs (an abort may discard the last one), and each loses at most what was
    computed."""
    for request in requests:
        assert request.num_preemptions <= request.num_output + (request.finish_reason == "abort")
    lost = sum(request.num_preemptions * (request.num_known + 1) for request in requests)
    assert scheduler.counters.recomputed_tokens <= lost
    assert scheduler.counters.preemptions == sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("rules", [None, {}, {"policy": "priority", "long_prefill_token_threshold": 4}])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_crowd_in_a_small_pool(depth, share, rules):
    """Bigger than what hypothesis draws: 40 requests over 8 rows, preempted again and again."""
    rng = np.random.default_rng(depth)
    stem = rng.integers(0, 3, 12).tolist()
    scheduler = make_scheduler(
        num_blocks=30,
        max_num_batched_tokens=16,
        max_running=8,
        max_model_len=60,
        scheduling_policy="prefill_first" if rules is None else "running_first",
        rules=Rules(**(rules or {}), share_prefixes=share),
    )
    engine = FakeEngine(scheduler, max_running=8, depth=depth)
    requests = []
    for number in range(40):
        prompt = stem[: rng.integers(0, 12)] + rng.integers(0, 3, rng.integers(1, 12)).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(1, 40)), ignore_eos=bool(rng.integers(0, 4)))
        request = Request.create(
            str(number), number, prompt, params, model_eos=END_TOKENS, engine_seed=1, priority=number % 3
        )
        requests.append(request)
        scheduler.add(request)
    while scheduler.has_unfinished() or engine.in_flight:
        engine.step()
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]
    assert scheduler.counters.preemptions > 10
    assert scheduler.counters.prefix_hit_tokens > 0
    assert scheduler.pool.num_free == 30
    if rules is None:
        check_recomputation_is_bounded(scheduler, requests)
    assert (scheduler.counters.prefix_waits > 0) == share
    assert len(engine.finished) == 40
