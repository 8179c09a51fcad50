"""ScheduledStep: what one step does, decided by the host; and the counters kept over all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxvllm.core.request import Request

StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(slots=True)
class Picks:
    """What a policy decides: row rows[b] computes its next num_tokens[b] tokens."""

    kind: StepKind
    rows: np.ndarray  # intp[B]
    num_tokens: np.ndarray  # int32[B]


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step over B requests: request b computes its tokens starts[b] .. starts[b] + num_tokens[b].

            0            starts[b]        starts[b] + num_tokens[b]     its tokens, known or in flight
            |-- in the cache --|----- computed by this step -----|------------------|
                                                                 ^ samples[b] if nothing is left after it

    A "decode" step has one token for each request, and the input of each is the token sampled for it before. A
    "prefill" step carries chunks of prompts (or of what a preempted request has to compute again), a "mixed" step both.
    """

    number: int  # steps are committed in the order of their numbers
    kind: StepKind
    requests: list[Request]  # length B
    rows: np.ndarray  # intp[B]: numpy indexes with it several times faster than with int32
    row_epochs: np.ndarray  # int32[B], Rows.epoch when scheduled
    starts: np.ndarray  # int32[B], computed tokens before the step
    num_tokens: np.ndarray  # int32[B], at least 1
    samples: np.ndarray  # bool[B], whether a token is sampled
    preempted: list[Request]  # sent back to wait in this schedule(), in the order in which it happened
    first_samples: list[int]  # those b that sample for the first time in their row

    @property
    def num_query_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made; tokens count when scheduled, unless it says "committed"."""

    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    prefill_tokens: int = 0  # computed in chunks
    decode_tokens: int = 0  # computed one by one, each after it was sampled
    output_tokens: int = 0  # committed to a request
    discarded_tokens: int = 0  # committed too late: the request had ended
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed, lost by a preemption, and not found again at readmission
    prefix_queried_tokens: int = 0  # known tokens at admissions
    prefix_hit_tokens: int = 0  # ... of which so many were in the cache
    prefix_waits: int = 0  # times that a request began to wait for blocks that another one was computing
    finished_requests: int = 0  # by "stop" or "length"
    aborted_requests: int = 0

    @property
    def steps(self) -> int:
        """Steps scheduled."""
        return self.prefill_steps + self.decode_steps + self.mixed_steps

    def count(self, step: ScheduledStep, num_decoding: int) -> None:
        """A new step, in which `num_decoding` requests compute the one token that was sampled before."""
        if step.kind == "decode":
            self.decode_steps += 1
        elif step.kind == "prefill":
            self.prefill_steps += 1
        else:
            self.mixed_steps += 1
        self.decode_tokens += num_decoding
        self.prefill_tokens += step.num_query_tokens - num_decoding
