"""The recorded schedules replay exactly, and the replayer notices what doesn't."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import replay
from jaxvllm.core import Rules
from tests.core.helpers import make_request, make_scheduler

TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.json"))
TRACES_V1 = sorted((Path(__file__).parents[1] / "traces_v1").glob("*.json"))
EXAMPLE = next(path for path in TRACES if path.stem == "five_requests_eleven_blocks")


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def test_there_are_31_and_20_traces():
    assert (len(TRACES), len(TRACES_V1)) == (31, 20)


@pytest.mark.parametrize("path", TRACES + TRACES_V1, ids=lambda path: path.stem)
def test_every_field_of_every_step_agrees(path):
    assert replay.replay(load(path)) == []


def test_the_traces_exercise_what_they_are_for():
    traces = [load(path) for path in TRACES]
    steps = [step for trace in traces for step in trace["steps"]]
    assert sum(len(step["preempted"]) for step in steps) >= 30
    assert any(len(step["preempted"]) > 1 for step in steps)
    beyond = [t for t in traces if any(len(s["running"]) > t["config"]["max_num_seqs"] for s in t["steps"])]
    assert len(beyond) == 21


def test_vllms_traces_exercise_what_they_are_for():
    traces = [load(path) for path in TRACES_V1]
    steps = [step for trace in traces for step in trace["steps"]]
    assert sum(len(step["preempted"]) for step in steps) >= 80
    assert sum(len(step["resumed"]) for step in steps) >= 80
    assert sum(hit > 0 for step in steps for _, hit in step.get("computed_at_admission", [])) >= 30
    assert any(not step["scheduled"] and step["preempted"] for step in steps)
    configs = [trace["config"] for trace in traces]
    assert {config["policy"] for config in configs} == {"fcfs", "priority"}
    assert {config["reserve_full_prompt"] for config in configs} == {True, False}
    assert {config["long_prefill_token_threshold"] > 0 for config in configs} == {True, False}


def test_a_block_that_was_allotted_and_never_computed_is_not_found_even_in_replay():
    """vLLM's fault, named at the end of tests/traces_v1/README.md: under "priority" a victim that had its tokens in
    this step leaves blocks that are known but were never computed."""
    rules = Rules(policy="priority")
    scheduler = make_scheduler(
        num_blocks=6, scheduling_policy="running_first", rules=rules, publish="at_allocation", max_num_batched_tokens=8
    )
    low, high = make_request(0, [5] * 12, priority=9), make_request(1, [6] * 6, priority=0)
    scheduler.add(low)
    scheduler.commit(scheduler.schedule(), np.zeros(1))  # type: ignore[arg-type]  # low: 8 of its 12 tokens, two blocks
    assert scheduler.pool.cached_blocks() == [0, 1]
    scheduler.add(high)
    scheduler.commit(scheduler.schedule(), np.zeros(2))  # type: ignore[arg-type]  # low 8..12, high 0..4
    published = scheduler.pool.match(np.full(13, 5, np.int32), [])
    assert len(published) == 3
    # Now as if low had been scheduled for its third block in the step in which it is preempted.
    scheduler.rows.num_computed[low.row] -= 4
    scheduler.preempt(low)
    assert scheduler.pool.match(np.full(13, 5, np.int32), []) == published[:2]
    scheduler.pool.check_integrity([request.block_table for request in scheduler.running])


@pytest.mark.parametrize(
    ("step", "field", "value"),
    [
        (0, "scheduled", []),
        (3, "preempted", [1]),
        (2, "admitted", [9]),
        (5, "resumed", [3]),
        (4, "computed_at_admission", [[0, 4]]),
        (1, "waiting", [7]),
        (1, "running", []),
        (6, "num_free_blocks", 99),
        (7, "finished", [0]),
        (8, "unheard_of", 1),
    ],
)
def test_one_changed_field_of_vllms_traces_is_found(step, field, value):
    trace = load(next(path for path in TRACES_V1 if path.stem == "cached_00"))
    assert trace["steps"][step].get(field) != value
    trace["steps"][step][field] = value
    (difference,) = replay.replay(trace)
    assert (difference.step, difference.field, difference.expected) == (step, field, value)


def tampered(step: int, field: str, value) -> dict:
    trace = copy.deepcopy(load(EXAMPLE))
    trace["steps"][step][field] = value
    return trace


@pytest.mark.parametrize(
    ("step", "field", "value", "request_number"),
    [
        (0, "kind", "decode", None),
        (1, "scheduled", [[3, 0, 1023]], 3),
        (3, "block_tables", {"0": [0, 1], "1": [2, 3], "2": [5], "3": [5, 6, 7, 8, 9]}, 2),
        (5, "preempted", [], 4),
        (5, "waiting", [], 4),
        (4, "running", [0, 1, 2, 3], 4),
        (7, "free", [3, 0, 2, 10, 4, 9, 8, 7, 6, 5], None),
        (6, "finished", [0, 1, 2], 3),
        (3, "cached_blocks_after", [0, 2, 5, 6, 7, 8], None),
        (2, "unheard_of", 1, None),
    ],
)
def test_one_changed_field_is_found(step, field, value, request_number):
    (difference,) = replay.replay(tampered(step, field, value))
    assert (difference.request, difference.step, difference.field) == (request_number, step, field)
    assert difference.expected == value or difference.expected == value.get(str(request_number))


def test_missing_and_surplus_steps_and_wrong_completions_are_found():
    trace = load(EXAMPLE)
    shorter = {**trace, "steps": trace["steps"][:-1]}
    assert [d.field for d in replay.replay(shorter)] == ["steps"]
    longer = {**trace, "steps": [*trace["steps"], trace["steps"][-1]]}
    assert [d.field for d in replay.replay(longer)] == ["steps"]
    other = {**trace, "completions": {**trace["completions"], "2": [1]}}
    assert [(d.field, d.request) for d in replay.replay(other)] == [("completions", 2)]
    with pytest.raises(ValueError, match="sampled_token_rule"):
        replay.replay({**trace, "sampled_token_rule": "something else"})


def test_the_command_prints_the_difference_and_exits_with_1(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(tampered(5, "preempted", [])))
    garbage = tmp_path / "garbage.json"
    garbage.write_text("{}")
    command = [sys.executable, "-m", "jaxvllm.replay"]
    bad = subprocess.run([*command, EXAMPLE, wrong, garbage], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "request 4  step 5  preempted: expected [], got [4]" in bad.stdout
    assert "garbage.json: not a recording" in bad.stdout
    good = subprocess.run([*command, EXAMPLE], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
