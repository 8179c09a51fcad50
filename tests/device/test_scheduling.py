"""running_first on a device: mixed steps, priorities, recordings, metrics. Tokens are those of prefill_first."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import jaxvllm
from jaxvllm import SamplingParams, replay
from jaxvllm.config import ConfigError
from tests.device.support import make_engine, poison, random_prompts, sampled, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS, PARAMS = random_prompts(9, seed=3, low=1, high=60), sampled(9, max_tokens=20)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with make_engine(async_steps=0) as engine:
        return tokens_of(engine, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_steps": 0},
        {"enable_prefix_caching": False, "pool": 30},
        {"pool": 30, "policy": "priority", "share_prefixes": True, "long_prefill_token_threshold": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128, "reserve_full_prompt": False},
    ],
    ids=["plain", "sync", "tight", "priority", "whole prompts"],
)
def test_the_same_tokens_in_mixed_steps_and_the_recording_replays(options, expected, tmp_path: Path) -> None:
    with make_engine(scheduling_policy="running_first", record=tmp_path / "run.json", **options) as engine:
        poison(engine)  # nothing is read that wasn't written, in mixed steps either
        assert tokens_of(engine, PROMPTS, PARAMS) == expected
        stats = engine.stats()
        assert stats["mixed_steps"] > 0 and stats["decode_steps"] > 0 and stats["compiles_after_warmup"] == 0
        assert (stats["preemptions"] > 0) == (options.get("pool") == 30)
        engine._scheduler.check_integrity()
    assert replay.replay(json.loads((tmp_path / "run.json").read_text())) == []


def test_prefill_first_records_and_replays_aborts_too(tmp_path: Path) -> None:
    with make_engine(pool=30) as engine:
        engine.generate([[1, 2, 3]] * 3, GREEDY, use_tqdm=False)  # the recording begins with a used pool
        with jaxvllm.record(engine, tmp_path / "run.json"):
            ids = [engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
            for _ in range(4):
                engine.step()
            engine.abort_request(ids[1])
            engine.abort_request(ids[8])
            engine.reset_prefix_cache()
            with pytest.raises(ValueError, match="can't be written"), jaxvllm.record(engine, tmp_path / "no" / "x"):
                raise AssertionError("it began")
            with pytest.raises(ValueError, match="recording"), jaxvllm.record(engine, tmp_path / "other.json"):
                pass
            while engine.has_unfinished_requests():
                engine.step()
        assert len(engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids) == 6
    trace = json.loads((tmp_path / "run.json").read_text())
    assert replay.replay(trace) == [] and trace["complete"]
    assert [event[1:] for event in trace["events"]] == [["abort", 1], ["abort", 8], ["reset"]]


def test_requests_may_come_at_any_time_and_tell_how_they_fared() -> None:
    with make_engine(scheduling_policy="running_first", policy="priority", rows=1) as engine:
        ids = [engine.add_request([7] * 30, GREEDY, priority=5)]
        outputs, order = {}, []
        for number in range(200):
            if number == 2:
                ids += [engine.add_request([number], GREEDY, priority=priority) for priority in (3, 1, 2)]
            for output in engine.step():
                outputs[output.request_id] = output
                order += [output.request_id] if output.finished else []
            if len(order) == 4:
                break
        assert order == [ids[0], ids[2], ids[3], ids[1]]
        for output in outputs.values():
            metrics = output.metrics
            assert metrics is not None and metrics.num_output_tokens == 6 and metrics.num_preemptions == 0
            assert None not in (metrics.admitted_time, metrics.first_token_time, metrics.finished_time)
            assert 0 <= metrics.queued_s <= metrics.first_token_s <= metrics.latency_s  # type: ignore[operator]
        assert outputs[ids[1]].metrics.queued_s > outputs[ids[2]].metrics.queued_s
        results = engine.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1, 0])
        first, second = (result.metrics for result in results)
        assert second.admitted_time < first.admitted_time  # type: ignore[union-attr, operator]
        for wrong in ([1], "x", [0.5, 1]):
            with pytest.raises(ValueError, match="priority"):
                engine.generate([[1], [2]], GREEDY, use_tqdm=False, priority=wrong)  # type: ignore[arg-type]


def test_a_priority_that_nobody_looks_at_is_refused() -> None:
    with make_engine(warmup=False) as engine:
        message = r"priority\[1\]=2 means nothing under policy='fcfs': .* policy='priority'"
        with pytest.raises(ValueError, match=message):
            engine.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 2])
        for call in (engine.add_request, engine.stream):
            with pytest.raises(ValueError, match="means nothing"):
                call([1], GREEDY, priority=-1)
        assert len(engine.generate([[1]], GREEDY, use_tqdm=False, priority=0)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fair"}, "policy='fair'"),
        ({"policy": "priority"}, "policy='priority' is not for scheduling_policy='prefill_first'"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"long_prefill_token_threshold": 9}, "it is for 'running_first'"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens=64 must be at least max_model_len - 1 = 127"),
        ({"scheduling_policy": "running_first", "enable_chunked_prefill": False, "long_prefill_token_threshold": 3},
         "leave one of them out"),
        ({"scheduling_policy": "running_first", "reserve_full_prompt": 1}, "reserve_full_prompt=1 must be True or"),
    ],
)  # fmt: skip
def test_wrong_rules_name_the_field(options, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_engine(**options)
