"""What is recorded replays: both policies, any depth of running ahead, aborts and resets in between."""

import json
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from jaxvllm import recording, replay
from jaxvllm.core import Request, Rules
from jaxvllm.sampling_params import SamplingParams
from tests.core.helpers import PROPERTY, Loop, make_request, make_scheduler
from tests.core.test_oracle import sampled
from tests.core.workloads import END_TOKENS, Workload, workloads


def record(workload: Workload, policy: str) -> dict:
    scheduler = make_scheduler(**workload.config, scheduling_policy=policy, rules=Rules(**workload.rules))
    recorder = recording.Recorder(scheduler, policy, workload.depth)
    in_flight: deque = deque()
    last_event, number = max(workload.events), 0
    while number <= last_event or scheduler.has_unfinished() or in_flight:
        for what, index in workload.events.get(number, []):
            if what == "add":
                wish = workload.wishes[index]
                params = SamplingParams(max_tokens=wish.max_tokens, ignore_eos=wish.ignore_eos)
                recorder.add(
                    Request.create(
                        f"r{index}", index, wish.prompt, params, model_eos=END_TOKENS, engine_seed=0,
                        priority=wish.priority,
                    )
                )  # fmt: skip
            elif what == "abort":
                recorder.abort(f"r{index}")
            else:
                recorder.reset_prefix_cache()
        number += 1
        if not scheduler.has_unfinished() and not in_flight:
            continue  # like the engine: nothing is scheduled when nobody is there
        step = recorder.schedule()
        if step is not None:
            in_flight.append(step)
        while len(in_flight) > (workload.depth if step is not None else 0):
            done = in_flight.popleft()
            places = zip(done.requests, (done.starts + done.num_tokens).tolist(), strict=True)
            recorder.commit(done, [sampled(r.request_id[1:], at) for r, at in places])  # type: ignore[arg-type]
    return json.loads(json.dumps(recorder.as_dict()))


@settings(PROPERTY, max_examples=40)
@given(workloads(resets=True, running_first=True, share=True))
def test_recordings_of_running_first_replay(workload):
    assert replay.replay(record(workload, "running_first")) == []


@settings(PROPERTY, max_examples=40)
@given(workloads(resets=True))
def test_recordings_of_prefill_first_replay(workload):
    assert replay.replay(record(workload, "prefill_first")) == []


def test_a_changed_recording_does_not_replay(tmp_path):
    loop = Loop(make_scheduler())
    recorder = recording.Recorder(loop.scheduler, "prefill_first", 0)
    loop.scheduler = recorder  # type: ignore[assignment]
    for i in range(3):
        recorder.add(make_request(i, [i] * 9, max_tokens=5))
    loop.drain()
    recorder.write(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    assert trace["complete"]
    assert trace["requests"][1]["finished_time"] >= trace["requests"][1]["first_token_time"] > 0
    assert replay.replay(trace) == []
    assert replay.main([str(tmp_path / "run.json")]) == 0
    trace["steps"][2]["free"].reverse()
    assert [(d.step, d.field) for d in replay.replay(trace)] == [(2, "free")]


def test_a_recording_begins_when_nobody_is_served_and_may_begin_late(tmp_path):
    loop = Loop(make_scheduler(scheduling_policy="running_first"))
    loop.scheduler.add(make_request(0, [1] * 9, max_tokens=2))
    with pytest.raises(ValueError, match="no request is being served"):
        recording.Recorder(loop.scheduler, "running_first", 0)
    loop.drain()  # the free list isn't in number order any more
    scheduler = loop.scheduler

    def start():
        loop.scheduler = recording.Recorder(scheduler, "running_first", 0)  # type: ignore[assignment]
        return loop.scheduler

    def stop():
        loop.scheduler = scheduler

    engine = SimpleNamespace(start_recording=start, stop_recording=stop)

    def fail():
        with recording.record(engine, tmp_path / "run.json"):
            loop.scheduler.add(make_request(1, [1] * 9, max_tokens=2))
            loop.step()
            raise ZeroDivisionError  # what was recorded until then is written all the same

    with pytest.raises(ZeroDivisionError):
        fail()
    trace = json.loads((tmp_path / "run.json").read_text())
    assert (trace["complete"], len(trace["steps"])) == (False, 1)
    assert replay.replay(trace) == []


def test_large_pools_are_recorded_without_their_blocks(monkeypatch):
    monkeypatch.setattr(recording, "MAX_BLOCKS", 10)
    loop = Loop(make_scheduler())
    loop.scheduler = recorder = recording.Recorder(loop.scheduler, "prefill_first", 0)  # type: ignore[assignment]
    recorder.add(make_request(0, [1] * 9, max_tokens=2))
    loop.drain()
    trace = recorder.as_dict()
    assert not {"free", "block_tables", "cached_blocks_after"} & set(trace["steps"][0])
    assert replay.replay(trace) == []
