"""Engines over several processes of one machine, with gloo between them, against an engine of one process."""

from __future__ import annotations

import json
from typing import Any

from tests.device.several_processes import SMALL, Processes, serve
from tests.device.support import make_engine


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_two_processes_serve_what_one_does() -> None:
    with Processes("run", serve="serve") as processes:
        with make_engine(tensor_parallel_size=2, **SMALL) as engine:  # while they start
            expected = serve(engine)
        stats = expected["stats"]
        assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0 and stats["aborted_requests"] >= 4
        assert expected["again"][1] > 0 and "prompt of 100 tokens" in expected["error"]
        assert processes.result(0) == plain(expected)
        assert processes.result(1) == plain(stats)
