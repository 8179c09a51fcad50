"""Replay recorded schedules: `python -m jaxvllm.replay FILE...`.

A recording (see tests/traces/README.md) holds a workload, the rule of a stub model, and what the reference scheduler
did. Here the same workload goes through ours, each step committed at once. The exit status is 0 only if every field of
every step agrees; else the first step that differs is printed, field by field. Must not know about devices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.core import Request, ScheduledStep, Scheduler
from jaxvllm.sampling_params import SamplingParams

TOKEN_RULE = "(request*7919 + position*104729 + 13) % 50, position = number of tokens before the new one"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that disagrees. `request` and `step` are None where the field isn't about one."""

    request: int | None
    step: int | None
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        at = ["-" if value is None else str(value) for value in (self.request, self.step)]
        return f"request {at[0]}  step {at[1]}  {self.field}: expected {self.expected}, got {self.got}"


def replay(trace: dict[str, Any]) -> list[Difference]:
    """Run a recording. The differences of the first step that has any, or of the end; [] if everything
    agrees.

    KeyError or ValueError if `trace` isn't a recording of a policy that we have.
    """
    if trace.get("sampled_token_rule", TOKEN_RULE) != TOKEN_RULE:
        raise ValueError(f"sampled_token_rule={trace['sampled_token_rule']!r} is not {TOKEN_RULE!r}")
    scheduler, requests = _build(trace)
    arrivals = [(wish["arrival_step"], number) for number, wish in enumerate(trace["requests"])]
    arrivals.sort(reverse=True)
    expected_steps = trace["steps"]
    number = 0
    while arrivals or scheduler.has_unfinished():
        while arrivals and (arrivals[-1][0] <= number or not scheduler.has_unfinished()):
            scheduler.add(requests[arrivals.pop()[1]])
        got = _record(scheduler)
        if number == len(expected_steps):
            return [Difference(None, number, "steps", len(expected_steps), "another one")]
        differences = list(_compare(number, expected_steps[number], got))
        if differences:
            return differences
        number += 1
    completions = {str(request.index): request.output_token_ids for request in requests}
    differences = list(_compare_mapping(None, "completions", trace["completions"], completions))
    if number != len(expected_steps):
        differences.append(Difference(None, None, "steps", len(expected_steps), number))
    return differences


def _build(trace: dict[str, Any]) -> tuple[Scheduler, list[Request]]:
    """The scheduler, and all requests by number, none of them added yet."""
    config = trace["config"]
    eos = config["eos"]
    scheduler = Scheduler(
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["num_blocks"] * config["block_size"] + 1,
        policy=trace.get("policy", "prefill_first"),
    )
    requests = []
    for number, wish in enumerate(trace["requests"]):
        params = SamplingParams(max_tokens=wish["max_tokens"], ignore_eos=wish["ignore_eos"])
        request = Request.create(str(number), number, wish["prompt"], params, model_eos=[eos], engine_seed=0)
        requests.append(request)
    return scheduler, requests


def stub_tokens(step: ScheduledStep) -> np.ndarray:
    """int32[B]: what the recordings' stub model samples; a function of the request and of its length."""
    position = step.starts + step.num_tokens
    index = np.array([request.index for request in step.requests])
    return ((index * 7919 + position * 104729 + 13) % 50).astype(np.int32)


def _record(scheduler: Scheduler) -> dict[str, Any]:
    """Schedule and commit one step; return it in the form of the recordings."""
    step = scheduler.schedule()
    if step is None:
        raise ValueError("the scheduler has nothing to run")
    chunks = zip(_ids(step.requests), step.starts.tolist(), step.num_tokens.tolist(), strict=True)
    record: dict[str, Any] = {
        "kind": step.kind,
        "scheduled": [list(chunk) for chunk in chunks],
        "block_tables": {str(request.index): request.block_table for request in step.requests},
        "preempted": _ids(step.preempted),
        "waiting": _ids(scheduler.waiting),
        "running": _ids(scheduler.running),
        "free": scheduler.pool.free_blocks(),
    }
    record["finished"] = _ids(scheduler.commit(step, stub_tokens(step)))
    record["cached_blocks_after"] = scheduler.pool.cached_blocks()
    return record


def _ids(requests: Any) -> list[int]:
    return [request.index for request in requests]


def _compare(number: int, expected: dict[str, Any], got: dict[str, Any]) -> Iterator[Difference]:
    """Differences of one step; a field that only one side has is one too."""
    for field in dict.fromkeys([*expected, *got]):
        want, have = expected.get(field), got.get(field)
        if want == have:
            continue
        if field == "block_tables" and want is not None and have is not None:
            yield from _compare_mapping(number, field, want, have)
        else:
            yield Difference(_culprit(field, want, have), number, field, want, have)


def _compare_mapping(
    number: int | None, field: str, expected: dict[str, Any], got: dict[str, Any]
) -> Iterator[Difference]:
    """Differences of a field that is a mapping by request."""
    for request in dict.fromkeys([*expected, *got]):
        if expected.get(request) != got.get(request):
            yield Difference(int(request), number, field, expected.get(request), got.get(request))


def _culprit(field: str, expected: Any, got: Any) -> int | None:
    """The request at the first place where two lists of requests differ; None for fields about no request."""
    if field not in ("scheduled", "preempted", "waiting", "running", "finished"):
        return None
    for want, have in itertools.zip_longest(expected or [], got or []):
        if want != have:
            entry = have if want is None else want
            return entry[0] if isinstance(entry, list) else entry
    return None


def main(arguments: list[str] | None = None, prog: str = "python -m jaxvllm.replay") -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog, description="Replay recorded schedules.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a recorded schedule (JSON)")
    failed = False
    for path in parser.parse_args(arguments).files:
        try:
            trace = json.loads(path.read_text())
            differences = replay(trace)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: not a recording that can be replayed: {type(error).__name__}: {error}")
            failed = True
            continue
        failed |= bool(differences)
        for difference in differences:
            print(f"{path}: {difference}")
        if not differences:
            print(f"{path}: {len(trace['steps'])} steps agree")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
