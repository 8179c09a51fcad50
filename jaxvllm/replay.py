"""Replay recorded schedules: `python -m jaxvllm.replay FILE...`.

A recording holds a workload, where its tokens come from, and what a scheduler did. There are three kinds: of the
reference of prefill_first (tests/traces/README.md), of vLLM's own scheduler (tests/traces_v1/README.md), and our own
(`jaxvllm.recording`). Here the same workload goes through our scheduler in the same loop. The exit status is 0 only if
every field of every step agrees; else the first step that differs is printed, field by field. Must not know about
devices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.core import Request, Rules, ScheduledStep, Scheduler
from jaxvllm.recording import BY_COMPLETIONS, committed, step_record
from jaxvllm.sampling_params import SamplingParams

TOKEN_RULE = "(request*7919 + position*104729 + 13) % 50, position = number of tokens before the new one"
TOKEN_RULE_V1 = (
    "(r*7919 + p*104729 + 13) % 50, r = the request's index, "
    "p = number of tokens (prompt and sampled) before the new one"
)
_BOTH = ("scheduled", "preempted", "waiting", "running", "finished")
FIELDS = {
    "prefill_first": {*_BOTH, "kind", "block_tables", "free", "cached_blocks_after"},
    "running_first": {*_BOTH, "admitted", "resumed", "num_free_blocks"},
}
"""What each step of a recording by others must hold; ours and "computed_at_admission" are compared as they come."""


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


class Replay:
    """One recording, run through our scheduler. `records`: our own entry for each step so far."""

    def __init__(self, trace: dict[str, Any]) -> None:
        """KeyError or ValueError if `trace` isn't a recording of a policy that we have."""
        if not isinstance(trace, dict):
            raise ValueError(f"a recording is a JSON object, not a {type(trace).__name__}")
        self.trace = trace
        self.records: list[dict[str, Any]] = []
        rule = trace.get("sampled_token_rule", TOKEN_RULE)
        if rule not in (TOKEN_RULE, TOKEN_RULE_V1, BY_COMPLETIONS):
            raise ValueError(f"sampled_token_rule={rule!r} is not {TOKEN_RULE!r} or {BY_COMPLETIONS!r}")
        self._by_completions = rule == BY_COMPLETIONS
        self.policy = trace.get("policy", "prefill_first")
        self.ours = "format" in trace
        self.scheduler = _scheduler(trace, self.policy, self.ours)
        self.requests = [_request(number, wish, trace["config"]) for number, wish in enumerate(trace["requests"])]
        self._arrivals = deque(sorted((wish["arrival_step"], n) for n, wish in enumerate(trace["requests"])))
        self._events = deque(trace.get("events", []))
        self._depth = trace["config"].get("async_steps", 0)
        self._in_flight: deque[ScheduledStep] = deque()

    @property
    def ended(self) -> bool:
        """Nothing is left to do."""
        return not (self._arrivals or self.scheduler.has_unfinished() or self._in_flight)

    def happen(self) -> None:
        """What came from outside before the next step."""
        number, scheduler = len(self.records), self.scheduler
        while self._arrivals and (
            self._arrivals[0][0] <= number or not (self.ours or scheduler.has_unfinished())  # theirs come early then
        ):
            scheduler.add(self.requests[self._arrivals.popleft()[1]])
        while self._events and self._events[0][0] <= number:
            _, what, *rest = self._events.popleft()
            if what == "abort":
                scheduler.abort(str(rest[0]))
            else:
                scheduler.reset_prefix_cache()

    def step(self) -> dict[str, Any]:
        """One turn of the loop: arrivals, schedule, commit what is more than async_steps old. Our entry for it."""
        self.happen()
        scheduler = self.scheduler
        step = scheduler.schedule()
        blocks = "free_at_start" in self.trace or not self.ours
        record = step_record(scheduler, step, _index, blocks=blocks)
        if not self.ours and self.policy == "prefill_first":
            record["preempted"].reverse()  # recorded in the order in which they had been running
        if step is not None:
            self._in_flight.append(step)
        committed(record, scheduler, (), _index)
        while len(self._in_flight) > (self._depth if step is not None else 0):
            oldest = self._in_flight.popleft()
            committed(record, scheduler, scheduler.commit(oldest, self._tokens(oldest)), _index)
        self.records.append(record)
        return record

    def _tokens(self, step: ScheduledStep) -> np.ndarray:
        if not self._by_completions:
            return stub_tokens(step)
        places = zip(step.requests, (step.starts + step.num_tokens).tolist(), strict=True)
        return np.array([self._recorded_token(request, place - request.num_prompt) for request, place in places])

    def _recorded_token(self, request: Request, place: int) -> int:
        """Token number `place` of its outputs; 0 for one that came too late to count."""
        completion = self.trace["completions"][str(request.index)]
        return completion[place] if 0 <= place < len(completion) else 0


def replay(trace: dict[str, Any]) -> list[Difference]:
    """Run a recording. The differences of the first step that has any, or of the end; [] if everything agrees.

    KeyError or ValueError if `trace` isn't a recording of a policy that we have.
    """
    run = Replay(trace)
    expected_steps = trace["steps"]
    for number, expected in enumerate(expected_steps):
        if run.ended:
            return [Difference(None, None, "steps", len(expected_steps), number)]
        got = run.step()
        fields = set(expected) if run.ours else FIELDS[run.policy] | set(expected)
        differences = list(_compare(number, expected, {field: got[field] for field in got if field in fields}))
        if differences:
            return differences
    if run.ours:
        run.happen()  # after the last step
    if trace.get("complete", True) and (run.scheduler.has_unfinished() or run._arrivals):
        return [Difference(None, len(expected_steps), "steps", len(expected_steps), "another one")]
    completions = {str(request.index): request.output_token_ids for request in run.requests}
    return list(_compare_mapping(None, "completions", trace["completions"], completions))


def _scheduler(trace: dict[str, Any], policy: str, ours: bool) -> Scheduler:
    config = trace["config"]
    rules = {name: config[name] for name in Rules.__dataclass_fields__ if name in config}
    scheduler = Scheduler(
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config.get("max_model_len", config["num_blocks"] * config["block_size"] + 1),
        max_running=config.get("max_running"),
        scheduling_policy=policy,
        rules=Rules(**rules),
        enable_prefix_caching=config.get("enable_prefix_caching", True),
        publish="at_allocation" if policy == "running_first" and not ours else "after_write",
    )
    if "free_at_start" in trace:  # it had served others before
        blocks = [scheduler.pool.take(1)[0] for _ in range(scheduler.pool.num_blocks)]
        if sorted(trace["free_at_start"]) != blocks:
            raise ValueError("free_at_start must hold every block once")
        scheduler.pool.release(trace["free_at_start"][::-1])
    return scheduler


def _request(number: int, wish: dict[str, Any], config: dict[str, Any]) -> Request:
    """Request `number`, not added yet. Its id is its number."""
    ends = wish["end_token_ids"] if "end_token_ids" in wish else [] if wish["ignore_eos"] else [config["eos"]]
    params = SamplingParams(max_tokens=wish["max_tokens"])
    return Request.create(
        str(number), number, wish["prompt"], params, model_eos=ends, engine_seed=0, priority=wish.get("priority", 0),
        has_siblings=wish.get("has_siblings", False),
    )  # fmt: skip


def stub_tokens(step: ScheduledStep) -> np.ndarray:
    """int32[B]: what the recordings' stub model samples; a function of the request and of its length."""
    position = step.starts + step.num_tokens
    index = np.array([request.index for request in step.requests])
    return ((index * 7919 + position * 104729 + 13) % 50).astype(np.int32)


def _index(request: Request) -> int:
    return request.index


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
    if field not in (*_BOTH, "admitted", "resumed", "computed_at_admission"):
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
        except OSError as error:
            print(f"{path}: {error.strerror}")
            failed = True
            continue
        except (ValueError, KeyError, TypeError) as error:
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
