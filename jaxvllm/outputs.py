"""What a request gives back: `RequestOutput` and `CompletionOutput`, shaped as vLLM's.

Plain data for callers. Must not know how the tokens came about; no jax, no tokenizer.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request.

    index: number of the completion within its request (0 for now: one completion a request).
    text: the decoded tokens; "" when the engine has no tokenizer.
    token_ids: generated ids, the one that ended the request included.
    finish_reason: None while it runs, then "stop" (end token or stop_token_ids), "length" or "abort".
    stop_reason: the id out of stop_token_ids that ended it; None for the model's own end tokens and limits.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's state as its caller sees it.

    request_id: the caller's name for it, or the engine's.
    prompt: the text that was given; None for a prompt of ids.
    prompt_token_ids: what the model read.
    outputs: its completions, at least one.
    finished: no more tokens will come.
    num_cached_tokens: prompt tokens that the prefix cache held at the first admission; 0 for a request that was
        never admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated ids of the first completion."""
        return self.outputs[0].token_ids
