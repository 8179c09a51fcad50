"""A request as its caller knows it: what was asked, and the output that is made of what the scheduler has so far.

Owns: RequestOutputs, their text, log-probabilities and deltas. Must not know: queues, steps, devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxvllm.core.request import Request
from jaxvllm.inputs import Prompt
from jaxvllm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from jaxvllm.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams
from jaxvllm.stop_strings import CompletionText
from jaxvllm.tokenizer import Tokenizer


@dataclass(slots=True)
class Wish:
    """What a caller wants of a request, and its bad words as token sequences."""

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()


def sample_ids(request_id: str, n: int) -> list[str]:
    """What the scheduler calls the n samples of a request."""
    return [request_id] if n == 1 else [f"{request_id}#{i}" for i in range(n)]


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """Those of sample number ``index``: its seed is the request's plus index, modulo 2**64."""
    return params if index == 0 or params.seed is None else replace(params, seed=(params.seed + index) & MAX_SEED)


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's n completions: the scheduler's request, its text (None: not asked for), its logprobs."""

    tracked: Tracked
    request: Request
    text: CompletionText | None
    num_decoded: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_sent_tokens: int = 0  # of what DELTA outputs have handed out
    num_sent_characters: int = 0

    @property
    def watches_text(self) -> bool:
        """Whether a stop string may end it: its text is read token by token."""
        return self.text is not None and bool(self.request.params.stop)

    @property
    def misses_logprobs(self) -> bool:
        """Whether a token has come whose log-probabilities were asked for and aren't noted yet."""
        return self.request.params.logprobs is not None and self.request.num_output > len(self.logprobs)

    @property
    def misses_prompt(self) -> bool:
        """Whether prompt_logprobs were asked for and are to be computed now, through this completion."""
        tracked = self.tracked
        wanted = tracked.params.prompt_logprobs is not None
        return wanted and tracked.prompt_parts is None and tracked.prompt_logprobs is None

    def read(self) -> str | None:
        """Decodes what is new; returns the stop string that ended the text, if one did."""
        if self.text is None:
            return None
        request, params = self.request, self.request.params
        while self.num_decoded < request.num_output:
            new = request.outputs_since(self.num_decoded)
            if self.num_decoded < params.min_tokens:  # up to there stop strings don't count
                new = new[: params.min_tokens - self.num_decoded]
            self.num_decoded += len(new)
            if request.finish_reason == "stop" and self.num_decoded == request.num_output and self._hides_end():
                new = new[:-1]
            self.text.push(new, may_stop=self.num_decoded > params.min_tokens)
        if request.finish_reason is not None:
            self.text.flush()
        return self.text.stop_string

    def begin_anew(self) -> None:
        """Its request was restarted: nothing of its output counts any more."""
        self.text = self.tracked.new_text()
        self.logprobs, self.cumulative_logprob = [], 0.0
        self.num_decoded = self.num_sent_tokens = self.num_sent_characters = 0
        self.tracked.prompt_parts = self.tracked.prompt_logprobs = None

    def _hides_end(self) -> bool:
        """Whether the text leaves out the token that ended it: end tokens and stop_token_ids, as in vLLM."""
        request = self.request
        ended_by_text = isinstance(request.stop_reason, str)
        return not ended_by_text and not request.params.include_stop_str_in_output

    def add_logprobs(self, numbers: np.ndarray, ids: np.ndarray) -> None:
        """Those of the token that was just committed: float32 and int32 [1 + max_logprobs], see gather_logprobs."""
        token = self.request.outputs_since(len(self.logprobs))[0]
        self.logprobs.append(logprobs_of(token, self.request.params.logprobs or 0, numbers, ids, self.tracked.decode))
        self.cumulative_logprob += float(numbers[0])

    def output(self, index: int, delta: bool) -> CompletionOutput:
        """Everything so far, or what ``mark_sent`` hasn't marked."""
        self.read()
        request = self.request
        wanted = request.params.logprobs is not None
        first_token, first_character = (self.num_sent_tokens, self.num_sent_characters) if delta else (0, 0)
        return CompletionOutput(
            index=index,
            text="" if self.text is None else self.text.shown[first_character:],
            token_ids=request.outputs_since(first_token),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self.logprobs[first_token:] if wanted else None,
            cumulative_logprob=self.cumulative_logprob if wanted else None,
        )

    def mark_sent(self, output: CompletionOutput) -> None:
        """``output``, a delta, was handed out."""
        self.num_sent_tokens += len(output.token_ids)
        self.num_sent_characters += len(output.text)


@dataclass(slots=True, eq=False)
class Tracked:
    """``online``: added by ``add_request``, so ``step`` returns its news.

    prompt_parts: the device's arrays for prompt_logprobs, chunk by chunk, until an output is made of them.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    tokenizer: Tokenizer | None
    online: bool
    completions: list[Completion] = field(default_factory=list)
    prompt_parts: list[tuple[Any, Any]] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    _prompt_ids: list[int] | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's ids, one list for all outputs: made at each step it would cost milliseconds."""
        ids = self._prompt_ids
        if ids is None:
            ids = self._prompt_ids = self.prompt.token_ids.tolist()
        return ids

    def add(self, request: Request) -> Completion:
        """One more completion."""
        completion = Completion(self, request, self.new_text())
        self.completions.append(completion)
        return completion

    def new_text(self) -> CompletionText | None:
        """The text of a completion that has no tokens yet; None: without a tokenizer, or detokenize=False."""
        params = self.params
        if self.tokenizer is None or not params.detokenize:
            return None
        stream = self.tokenizer.detokenizer(self.prompt_ids, skip_special_tokens=params.skip_special_tokens)
        return CompletionText(stream, params.stop or (), include_stop=params.include_stop_str_in_output)

    @property
    def decode(self) -> Callable[[int], str] | None:
        """A token's text, where there is a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.token_text

    @property
    def is_watched(self) -> bool:
        """Whether the engine has to look at each of its tokens when it comes."""
        params = self.params
        return bool(self.online or params.stop or params.logprobs is not None or params.prompt_logprobs is not None)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.request.finish_reason is not None for completion in self.completions)

    @property
    def num_output(self) -> int:
        """Tokens of all completions so far."""
        return sum(completion.request.num_output for completion in self.completions)

    @property
    def has_news(self) -> bool:
        """Whether ``step`` should return it now, if it has changed."""
        return self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    def output(self, kind: RequestOutputKind | None = None) -> RequestOutput:
        """All tokens and all text so far, or what is new (DELTA); None: as ``params.output_kind`` says."""
        if self.prompt_parts is not None:
            self._read_prompt_logprobs()
        delta = (kind or self.params.output_kind) is RequestOutputKind.DELTA
        request = self.completions[0].request
        outputs = [completion.output(i, delta) for i, completion in enumerate(self.completions)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=request.first_cached_tokens if request.num_admissions else None,
            metrics=self._metrics(),
            prompt_logprobs=self.prompt_logprobs,
        )

    def _metrics(self) -> RequestMetrics:
        requests = [completion.request for completion in self.completions]
        return RequestMetrics(
            arrival_time=requests[0].arrival_time,
            admitted_time=min((r.admitted_time for r in requests if r.admitted_time), default=None),
            first_token_time=min((r.first_token_time for r in requests if r.first_token_time), default=None),
            finished_time=max(r.finished_time for r in requests) if all(r.finished_time for r in requests) else None,
            num_output_tokens=sum(r.num_output for r in requests),
            num_preemptions=sum(r.num_preemptions for r in requests),
            num_recomputed_tokens=sum(r.num_recomputed for r in requests),
        )

    def mark_sent(self, output: RequestOutput) -> None:
        """``output``, made by ``output()``, was handed out: DELTA goes on behind it."""
        if self.params.output_kind is RequestOutputKind.DELTA:
            for completion, part in zip(self.completions, output.outputs, strict=True):
                completion.mark_sent(part)

    def _read_prompt_logprobs(self) -> None:
        """Waits for the device's arrays and makes entries of them, for the prompt's tokens from the second on."""
        decode, token_ids = self.decode, self.prompt_ids
        self.prompt_logprobs = [None]
        for part in self.prompt_parts or ():
            for numbers, ids in zip(*map(np.asarray, part), strict=True):
                token, wanted = token_ids[len(self.prompt_logprobs)], self.params.prompt_logprobs or 0
                self.prompt_logprobs.append(logprobs_of(token, wanted, numbers, ids, decode))
        self.prompt_parts = None


def logprobs_of(token: int, num_top: int, numbers: np.ndarray, ids: np.ndarray,
                decode: Callable[[int], str] | None) -> Logprobs:  # fmt: skip
    """One position's entry out of ``gather_logprobs``' row: numbers, ids [1 + max_logprobs]."""

    def entry(number: Any, rank: Any, token_id: int) -> Logprob:
        return Logprob(float(number), int(rank), None if decode is None else decode(token_id))

    found = {token: entry(numbers[0], ids[0], token)}
    for rank in range(1, num_top + 1):
        token_id = int(ids[rank])
        if token_id >= 0 and token_id != token:
            found[token_id] = entry(numbers[rank], rank, token_id)
    return found
