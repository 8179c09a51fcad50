"""A request as its caller knows it: what was asked, and the output that is made of what the scheduler has so far.

Owns: RequestOutputs and their text. Must not know: queues, steps, devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxvllm.core.request import Request
from jaxvllm.detokenizer import Detokenizer
from jaxvllm.inputs import Prompt
from jaxvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput


@dataclass(slots=True)
class Tracked:
    """``online``: added by ``add_request``, so ``step`` returns its news. ``stream``: None without a tokenizer."""

    request: Request
    prompt: Prompt
    online: bool
    stream: Detokenizer | None = None
    text: str = ""
    num_decoded: int = 0

    def output(self) -> RequestOutput:
        """All tokens and all text so far; characters that a later token may change are held back until the end."""
        request = self.request
        token_ids = request.output_token_ids
        finished = request.finish_reason is not None
        if self.stream is not None:
            self.text += self.stream.push(token_ids[self.num_decoded :])
            if finished:
                self.text += self.stream.flush()
            self.num_decoded = len(token_ids)
        completion = CompletionOutput(0, self.text, token_ids, request.finish_reason, request.stop_reason)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids.tolist(),
            outputs=[completion],
            finished=finished,
            num_cached_tokens=request.first_cached_tokens if request.num_admissions else None,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                admitted_time=request.admitted_time or None,
                first_token_time=request.first_token_time or None,
                finished_time=request.finished_time or None,
                num_output_tokens=len(token_ids),
                num_preemptions=request.num_preemptions,
                num_recomputed_tokens=request.num_recomputed,
            ),
        )
