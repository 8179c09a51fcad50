"""The recorded schedules replay exactly, and the replayer notices what doesn't."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxvllm import replay

TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.json"))
EXAMPLE = next(path for path in TRACES if path.stem == "five_requests_eleven_blocks")


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def test_there_are_31_traces():
    assert len(TRACES) == 31


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_field_of_every_step_agrees(path):
    assert replay.replay(load(path)) == []


def test_the_traces_exercise_what_they_are_for():
    traces = [load(path) for path in TRACES]
    steps = [step for trace in traces for step in trace["steps"]]
    assert sum(len(step["preempted"]) for step in steps) >= 30
    assert any(len(step["preempted"]) > 1 for step in steps)
    beyond = [t for t in traces if any(len(s["running"]) > t["config"]["max_num_seqs"] for s in t["steps"])]
    assert len(beyond) == 21


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
