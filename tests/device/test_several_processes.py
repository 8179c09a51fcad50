"""Engines over several processes of one machine, with gloo between them, against an engine of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxvllm import Engine, ModelConfig
from tests.device.several_processes import ROOT, SMALL, Processes, processed, serve
from tests.device.support import ONE_LAYER, make_engine


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_two_processes_serve_what_one_does() -> None:
    with Processes("run", serve="serve", model=ONE_LAYER) as processes:
        with make_engine(ModelConfig(**ONE_LAYER), tensor_parallel_size=2, **SMALL) as engine:  # while they start
            expected = serve(engine)
        stats = expected["stats"]
        assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0 and stats["aborted_requests"] >= 4
        assert expected["again"][1] > 0 and "prompt of 100 tokens" in expected["error"]
        assert processes.result(0) == plain(expected)
        assert processes.result(1) == plain(stats)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefill_first", "running_first"])
def test_two_processes_of_two_devices_do_all_that_one_does(policy: str) -> None:
    options = {"enable_processors": True, "scheduling_policy": policy, "num_blocks": 40}
    model = str(ROOT / "examples" / "tiny-kjv")
    with Processes("run", devices=2, serve="processed", engine=options, model=model) as processes:
        with Engine(model, tensor_parallel_size=4, **(SMALL | options)) as engine:
            expected = processed(engine)
        assert processes.result(0) == plain(expected)
        assert processes.result(1) == plain(expected["stats"])


@pytest.mark.slow
def test_other_engines_of_two_processes() -> None:
    with Processes("others") as processes:
        own, left = processes.result(0)
        assert left == []
        assert processes.result(1) == [own]
        assert "\\n" in processes.text(0) or "the" in processes.text(0)  # the example's text


# what happens in which process; what the others' logs say
BREAKS = [
    ("raise", 0, "another process stopped: process 0: no room for step 5"),
    ("raise", 1, "another process stopped: process 1: no room for step 5"),
    ("stay", 0, "another process stopped: process 0: no room for step 5"),
    ("start", 1, "another process stopped: process 1: no room for step 5"),
    ("score", 0, "another process stopped: process 0: no room for step 5"),
    ("score", 1, "another process stopped: process 1: no room for step 5"),
    ("kill", 0, ""),
    ("kill", 1, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "who", "said"), BREAKS)
def test_nobody_waits_for_ever_for_one_that_broke(what: str, who: int, said: str) -> None:
    with Processes("broken", what=what, who=who, heartbeat=10) as processes:
        other = 1 - who
        if what != "start":
            processes.wait_for(other, "ready")
        if what == "stay":
            processes.wait_for(other, said)
            return
        assert processes.status(other) != 0
        assert processes.status(who) != 0
        assert said in processes.text(other)


@pytest.mark.slow
def test_a_program_that_leaves_its_engine_ends_the_others_well() -> None:
    with Processes("broken", what="leave", who=0) as processes:
        assert processes.status(1) == 0
        assert processes.status(0) == 1 and "KeyError" in processes.text(0)
