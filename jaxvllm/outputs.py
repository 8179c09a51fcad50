"""What a request gives back: `RequestOutput`, `CompletionOutput`, `Logprob`, `RequestMetrics`, shaped as vLLM's.

Plain data for callers. Must not know how the tokens came about; no jax, no tokenizer.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """logprob: natural logarithm of the probability. rank: 1 for the most probable token; equals count as before it.

    decoded_token: its text; None when the engine has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""By token id: the chosen token's first, then those of the most probable ones, falling."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request: everything so far, or under RequestOutputKind.DELTA what is new.

    index: number of the completion within its request, below SamplingParams.n.
    text: the decoded tokens, without what a later token may change; "" when the engine has no tokenizer.
    token_ids: generated ids, the one that ended the request included.
    finish_reason: None while it runs, then "stop" (end token, stop_token_ids or stop string), "length" or "abort".
    stop_reason: the id out of stop_token_ids or the stop string that ended it; None for the model's own end tokens and
        for limits.
    logprobs: of each token, if they were asked for. cumulative_logprob: the sum over all its tokens so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """How a request fared. Times are seconds of time.perf_counter(); None: not yet.

    arrival_time: it was given to the engine. admitted_time: it first got blocks and a place in a step.
    first_token_time, finished_time: the host knew of it.
    num_output_tokens: generated so far. num_preemptions: times that it lost its blocks and waited again.
    num_recomputed_tokens: computed tokens that its preemptions threw away and the prefix cache didn't give back.
    """

    arrival_time: float
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    @property
    def queued_s(self) -> float | None:
        """From its arrival to its first admission."""
        return None if self.admitted_time is None else self.admitted_time - self.arrival_time

    @property
    def first_token_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency_s(self) -> float | None:
        """From its arrival to its end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request's state as its caller sees it.

    request_id: the caller's name for it, or the engine's.
    prompt: the text that was given; None for a prompt of ids.
    prompt_token_ids: what the model read.
    outputs: its completions, SamplingParams.n of them.
    finished: no more tokens will come, to any of them.
    num_cached_tokens: prompt tokens that the prefix cache held at the first admission; None before it.
    metrics: when it arrived, was admitted, had its first token and its end; preemptions. Of all completions together:
        the first admission and token, the last end, sums.
    prompt_logprobs: of each prompt token, if they were asked for and are there yet; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated ids of the first completion."""
        return self.outputs[0].token_ids
