"""What the scheduler tests share: short constructors, and a loop that may run ahead like the engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from jaxvllm.core import Request, ScheduledStep, Scheduler
from jaxvllm.sampling_params import SamplingParams

Sample = Callable[[ScheduledStep], np.ndarray]

# The same examples in every run: a failure here is always a change's fault.
PROPERTY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def make_scheduler(**changes: Any) -> Scheduler:
    """A scheduler with room for most small tests; name what matters to yours."""
    config: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    return Scheduler(**{**config, **changes})


def make_request(index: int, prompt: Any, max_tokens: int | None = 16, *, priority: int = 0, **params: Any) -> Request:
    """Request number `index`; its id is the number, and tokens 90 and 91 are the model's end tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request.create(str(index), index, prompt, sampling, model_eos=[90, 91], engine_seed=0, priority=priority)


def count_up(step: ScheduledStep) -> np.ndarray:
    """A stub model: the token after n tokens is n % 50, for any request."""
    return ((step.starts + step.num_tokens) % 50).astype(np.int32)


def counted_up(request: Request) -> list[int]:
    """What `count_up` gives this request until its limit."""
    return [n % 50 for n in range(request.num_prompt, request.token_limit)]


class Loop:
    """schedule, commit, and `depth` steps in between. The scheduler is checked after each call."""

    def __init__(self, scheduler: Scheduler, sample: Sample = count_up, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.sample = sample
        self.depth = depth
        self.in_flight: deque[tuple[ScheduledStep, np.ndarray]] = deque()
        self.steps: list[ScheduledStep] = []
        self.finished: list[Request] = []

    def step(self) -> ScheduledStep | None:
        """Schedule and "run" one step, then commit what is more than `depth` steps old."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.steps.append(step)
            self.in_flight.append((step, self.sample(step)))
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.commit()
        return step

    def commit(self) -> None:
        """Commit the oldest step in flight."""
        self.finished += self.scheduler.commit(*self.in_flight.popleft())
        self.scheduler.check_integrity()

    def drain(self, max_steps: int = 10_000) -> list[Request]:
        """Run until nobody is left and nothing is in flight; all requests that finished so far."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                return self.finished
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


def run_all(scheduler: Scheduler, requests: Iterable[Request], depth: int = 0) -> Loop:
    """Add all requests, drain, and check that the pool is whole again."""
    loop = Loop(scheduler, depth=depth)
    for request in requests:
        scheduler.add(request)
    loop.drain()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return loop
