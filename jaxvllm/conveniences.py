"""Further ways to call an engine: conversations, and one request as a stream. Of the engine's room.

Owns nothing of its own. Must not know how steps are run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.inputs import Prompt, parse_priorities, parse_prompt
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.outputs import RequestOutput
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Tracked, Wish

Message = Mapping[str, Any]


class Conveniences:
    """``chat`` and ``stream``, on top of an engine's queue and loop."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    _encode: Any
    _lock: threading.RLock
    _check_open: Any
    _generate: Any
    _parse_params: Any
    _wish: Any
    _add: Any
    _advance: Any
    _drop: Any

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
             add_generation_prompt: bool = True, enable_thinking: bool | None = None,
             tools: Sequence[Mapping[str, Any]] | None = None,
             chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
             priority: int | Sequence[int] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation or several, written by the tokenizer's own chat template, or by chat_template.

        messages: [{"role": ..., "content": ...}, ...], or a list of such lists. add_generation_prompt: the template
        opens the assistant's turn. enable_thinking (Qwen3's switch; None: the template's default), tools and
        chat_template_kwargs go to the template. Special tokens come from the template alone, never twice.

        Raises ValueError without a tokenizer or template, and as ``generate`` does.
        """
        self._check_open()
        if self.tokenizer is None:
            raise ValueError("the model's directory holds no tokenizer, so it has no chat template: give token ids")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError('messages must be a list like [{"role": "user", "content": "..."}], or a list of those')
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        options = dict(chat_template_kwargs or {})
        if chat_template is not None:
            options["chat_template"] = chat_template
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking
        if tools is not None:
            options["tools"] = list(tools)
        prompts = []
        for i, conversation in enumerate(conversations):
            text = self.tokenizer.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt, **options
            )
            ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
            parsed = parse_prompt(ids, None, self.model_config.vocab_size, f"messages[{i}]")
            prompts.append(Prompt(text, parsed.token_ids))
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, *, priority: int = 0
               ) -> Iterator[RequestOutput]:  # fmt: skip
        """Outputs of one prompt as its tokens come; with sampling_params' output_kind DELTA only what is new each time.

        The engine runs while the caller asks for the next output; other requests go on with it. Closing the iterator
        aborts the request and frees its blocks. Raises ValueError at once for what can't be served.
        """
        self._check_open()
        parsed = parse_prompt(prompt, self._encode, self.model_config.vocab_size, "prompt")
        wish = self._wish(self._parse_params(sampling_params, 1)[0])
        return self._stream(parsed, wish, parse_priorities(priority, 1, self.config.policy)[0])

    def _stream(self, prompt: Prompt, wish: Wish, priority: int) -> Iterator[RequestOutput]:
        with self._lock, deferred_interrupts():
            tracked: Tracked = self._add(prompt, wish, priority, request_id=None, online=False)
        seen, finished = 0, False
        try:
            while not finished:
                with self._lock, deferred_interrupts() as interrupts:
                    while not (tracked.finished or (tracked.num_output > seen and tracked.has_news)):
                        self._check_open()
                        self._advance()
                        interrupts.deliver()
                    output = tracked.output()
                    tracked.mark_sent(output)
                    seen, finished = tracked.num_output, output.finished
                yield output
        finally:
            with self._lock, deferred_interrupts():
                self._drop(tracked)
