"""A policy is a function. One that mixes prompt chunks and decoding in a step works with everything else as it is."""

import numpy as np
import pytest

from jaxvllm.core import BucketTable, Request, Scheduler
from jaxvllm.core.policy import POLICIES, Policy
from jaxvllm.core.prefill_first import prefill_first
from jaxvllm.core.step import Picks
from jaxvllm.sampling_params import SamplingParams
from tests.core.fake_device import FakeEngine, generate
from tests.core.helpers import make_scheduler
from tests.core.workloads import END_TOKENS, VOCABULARY


def mixed(scheduler: Scheduler) -> Picks | None:
    """One token for everybody who runs, and a chunk of one prompt with what is left of the budget."""
    rows = scheduler.runnable_rows()
    needs_block = scheduler.needs_block(rows)
    if np.count_nonzero(needs_block) > scheduler.pool.num_free or not len(rows):
        return prefill_first(scheduler)
    scheduler.append_blocks(rows[needs_block])
    chunk = scheduler.max_num_batched_tokens - len(rows)
    request = scheduler.waiting[0] if scheduler.waiting else None
    cached = scheduler.find_room(request) if request is not None and request.row < 0 else None
    if request is None or chunk < 1 or (request.row < 0 and cached is None):
        return Picks("decode", rows, np.ones(len(rows), np.int32))
    if cached is not None:
        scheduler.admit(request, cached)
    chunk = min(chunk, request.num_tokens - request.num_computed)
    if request.num_computed + chunk == request.num_tokens:
        scheduler.start_running(request)
    return Picks("mixed", np.append(rows, request.row), np.array([1] * len(rows) + [chunk], np.int32))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_with_chunks_and_single_tokens_together(depth, monkeypatch):
    monkeypatch.setitem(POLICIES, "mixed", Policy(mixed))
    scheduler = make_scheduler(scheduling_policy="mixed", num_blocks=400, max_num_batched_tokens=9, max_running=5)
    engine = FakeEngine(scheduler, max_running=5, depth=depth)
    engine.buckets = BucketTable([1, 5], [3, 9], max_num_seqs=5)
    rng = np.random.default_rng(depth)
    requests = []
    for number in range(12):
        prompt = rng.integers(0, 3, rng.integers(1, 30)).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(1, 20)), ignore_eos=number % 3 > 0)
        requests.append(Request.create(str(number), number, prompt, params, model_eos=END_TOKENS, engine_seed=2))
        scheduler.add(requests[-1])
    while scheduler.has_unfinished() or engine.in_flight:
        engine.step()
    for request in requests:
        prompt, ends = request.prompt_token_ids.tolist(), set(request.eos_token_ids)
        assert request.output_token_ids == generate(prompt, request.seed, request.token_limit, ends, VOCABULARY)
    # There were steps of both kinds of work.
    assert scheduler.counters.mixed_steps > 10
    counters, outputs = scheduler.counters, sum(len(request.output_token_ids) - 1 for request in requests)
    assert counters.decode_tokens == outputs + counters.discarded_tokens
