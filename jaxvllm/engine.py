"""Engine: the one file that knows every room.

    generate -> tokenizer -> Request -> Scheduler -> StepPlan -> Executor -> tokens -> Scheduler.commit -> outputs

The loop runs one step ahead: step n+1 is dispatched before step n's tokens are read, so the device never waits for the
host. ``async_steps=0`` is the same code with an immediate commit, and the oracle in the tests.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, cast

from jax.sharding import Mesh

from jaxvllm import scoring, startup
from jaxvllm.bookkeeping import Bookkeeping
from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.conveniences import Conveniences
from jaxvllm.core.plan import fill_plan
from jaxvllm.core.request import Request
from jaxvllm.core.step import ScheduledStep
from jaxvllm.distributed import at_end
from jaxvllm.following import Followable
from jaxvllm.generation_defaults import default_params
from jaxvllm.inputs import Prompt, parse_priorities, parse_prompt, parse_prompts
from jaxvllm.interrupts import deferred_interrupts
from jaxvllm.outputs import RequestOutput
from jaxvllm.processing import Processing
from jaxvllm.progress import Progress
from jaxvllm.recordable import Recordable, record_path
from jaxvllm.runtime.executor import StepHandle
from jaxvllm.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Completion, Tracked
from jaxvllm.trainable import Trainable


class Engine(Conveniences, Trainable, Bookkeeping, Followable, Recordable):
    """Generates text with a dense Qwen or Llama model.

    model: a directory with a Hugging Face checkpoint, or one made by ``python -m jaxvllm.convert``; a ModelConfig
        instead gives random weights (benchmarks, tests).
    tensor_parallel_size: number of devices that share the model; None: the mesh's, or 1.
    mesh: a jax.sharding.Mesh with the one axis "tp" (others of size 1): its devices, and no others, are used; None:
        the first ``tensor_parallel_size`` of ``jax.devices()``. With devices of several processes: see ``follow``.
    block_size: tokens per KV cache block. num_blocks: blocks in the pool; None measures how many fit.
    max_num_seqs: requests that run at the same time. max_num_batched_tokens: tokens in one step.
    max_model_len: prompt and output tokens of one request; None takes the model's positions.
    gpu_memory_utilization: share of each device's memory that the engine may use.
    scheduling_policy: "prefill_first" (prompts stop decoding) or "running_first" (one budget for both); core.Rules
        has policy, long_prefill_token_threshold, reserve_full_prompt, enable_chunked_prefill, share_prefixes.
    enable_prefix_caching: reuse the cache of equal prompt beginnings.
    dtype: "bfloat16" or "float32"; None takes the checkpoint's.
    seed: key of the noise of requests that bring no seed, and of random weights.
    attention_backend: "auto", or one of "triton", "mosaic" (Hopper), "xla", "reference", "triton_interpret" and
        "mosaic_interpret" (slow, anywhere: for tests); one that can't run here gives way to another with a warning.
    batch_invariant: the same tokens and log-probabilities to the last bit, whatever else is in a batch; slower.
    disable_custom_all_reduce: sums over devices by XLA's all-reduces, also where our own kernel could.
    async_steps: steps dispatched ahead of the one whose tokens are read; 0 reads each step at once.
    decode_buckets, token_buckets: padded batch sizes and token counts to compile; None takes the default tables.
    enable_processors: serve all that SamplingParams can ask for; False only temperature, seeds, stops: less memory.
    max_logprobs: most probable tokens that a request may ask for. logprobs_mode: "raw_logprobs" (of the model's
        distribution) or "processed_logprobs" (of the one that was drawn from).
    generation_config: "auto": where no sampling_params are given, the checkpoint's generation_config.json says what
        they are; "none": SamplingParams().
    warmup: compile every bucket now; False compiles each at its first use.
    record: write the schedule to this file when the engine is closed (see jaxvllm.recording).

    Raises ConfigError, CheckpointError (both ValueErrors) naming field, value, limit and the way out.
    """

    def __init__(self, model: str | os.PathLike[str] | ModelConfig | startup.GivenModel, *,
                 tensor_parallel_size: int | None = None, mesh: Mesh | None = None, block_size: int = 64,
                 num_blocks: int | None = None, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192,
                 max_model_len: int | None = None, gpu_memory_utilization: float = 0.9,
                 scheduling_policy: str = "prefill_first", policy: str = "fcfs",
                 long_prefill_token_threshold: int = 0, reserve_full_prompt: bool = True,
                 enable_chunked_prefill: bool = True, share_prefixes: bool = True,
                 enable_prefix_caching: bool = True, dtype: str | None = None, seed: int = 0,
                 attention_backend: str = "auto", batch_invariant: bool = False,
                 disable_custom_all_reduce: bool = False, async_steps: int = 1,
                 decode_buckets: Sequence[int] | None = None, token_buckets: Sequence[int] | None = None,
                 enable_processors: bool = True, max_logprobs: int = 20, logprobs_mode: str = "raw_logprobs",
                 generation_config: str = "auto", warmup: bool = True,
                 record: str | os.PathLike[str] | None = None) -> None:  # fmt: skip
        started = time.perf_counter()
        asked = EngineConfig(
            tensor_parallel_size=startup.num_shards(tensor_parallel_size, mesh), block_size=block_size,
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
            scheduling_policy=scheduling_policy, policy=policy,
            long_prefill_token_threshold=long_prefill_token_threshold, reserve_full_prompt=reserve_full_prompt,
            enable_chunked_prefill=enable_chunked_prefill, share_prefixes=share_prefixes,
            enable_prefix_caching=enable_prefix_caching, dtype=dtype, seed=seed,
            attention_backend=attention_backend, batch_invariant=batch_invariant,
            disable_custom_all_reduce=disable_custom_all_reduce, async_steps=async_steps,
            decode_buckets=None if decode_buckets is None else tuple(decode_buckets),
            token_buckets=None if token_buckets is None else tuple(token_buckets),
            enable_processors=enable_processors, max_logprobs=max_logprobs, logprobs_mode=logprobs_mode,
            generation_config=generation_config, warmup=warmup,
        )  # fmt: skip
        self._record_path = record_path(record)
        given = model if isinstance(model, startup.GivenModel) else None
        path = None if given or isinstance(model, ModelConfig) else startup.checkpoint_path(model)
        self.model_config = cast(ModelConfig, given.config if given else ModelConfig.from_dir(path) if path else model)
        self.config = asked.resolve(self.model_config)
        rules = startup.scheduling_rules(self.config)
        self.tokenizer = given.tokenizer if given else Tokenizer.from_dir(path) if path else None
        self._encode = None if self.tokenizer is None else self.tokenizer.encode
        self._end_tokens = set(self.model_config.eos_token_ids)  # with the tokenizer's own: the union ends a sequence
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            self._end_tokens.add(self.tokenizer.eos_token_id)
        self._default_params = default_params(path if generation_config == "auto" else None)
        self.buckets = startup.bucket_table(self.config)
        mesh = startup.choose_mesh(self.config, mesh)
        self._group = startup.join_group(mesh, self.model_config, self.config, self._end_tokens)
        self._say_end = at_end(self, self._group)
        self._executor = startup.make_executor(
            self.model_config, self.config, self.buckets, given or path, mesh, self._group
        )
        self.config = replace(self.config, num_blocks=self._executor.num_blocks).resolve(self.model_config)
        self._scheduler = startup.make_scheduler(self.config, rules)
        self._processing = Processing(self._executor, self.config.max_num_seqs)
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._tracked: dict[str, Tracked] = {}
        self._changed: dict[str, Tracked] = {}
        self._completions: dict[str, Completion] = {}
        self._num_requests = self._num_watched = 0
        self._closed = ""
        if record is not None and not self._group.follows:
            self.start_recording()
        self._lock = threading.RLock()  # one caller at a time: other threads wait
        self.start_seconds = time.perf_counter() - started

    def generate(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True, *, priority: int | Sequence[int] | None = None
                 ) -> list[RequestOutput]:  # fmt: skip
        """Completes every prompt; outputs in the prompts' order.

        prompts: a string, strings, a list of token ids, lists of ids, numpy or jax arrays of ids.
        sampling_params: one for all, or one for each prompt; None takes ``get_default_sampling_params()``.
        priority: one for all, or one for each prompt; smaller is more urgent, under policy="priority".

        Raises ValueError for a prompt or parameter that can't be served, before anything runs; the engine goes on.
        """
        self._check_open()
        parsed = parse_prompts(prompts, self._encode, self.model_config.vocab_size)
        return self._generate(parsed, sampling_params, use_tqdm, priority)

    def _generate(self, prompts: Sequence[Prompt], sampling_params: Any, use_tqdm: bool, priority: Any
                  ) -> list[RequestOutput]:  # fmt: skip
        wishes = self._wishes(prompts, sampling_params)
        priorities = parse_priorities(priority, len(prompts), self.config.policy)
        mine: list[Tracked] = []
        with self._lock, deferred_interrupts() as interrupts:
            try:
                for prompt, wish, urgency in zip(prompts, wishes, priorities, strict=True):
                    mine.append(self._add(prompt, wish, urgency, request_id=None, online=False))
                with Progress(len(mine), self._scheduler.counters, enabled=use_tqdm) as progress:
                    waiting = {completion.request for tracked in mine for completion in tracked.completions}
                    while waiting and self._scheduler.has_unfinished():
                        for request in self._advance():
                            if request in waiting:
                                waiting.discard(request)
                                if self._completions[request.request_id].tracked.finished:
                                    progress.finished_one()
                        progress.show(self._scheduler.counters)
                        interrupts.deliver()
                return [tracked.output(RequestOutputKind.CUMULATIVE) for tracked in mine]
            finally:  # an error or an interrupt leaves nothing of this call behind
                for tracked in mine:
                    self._drop(tracked)

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None, *,
                    request_id: str | None = None, priority: int = 0) -> str:  # fmt: skip
        """Queues one prompt and returns its id (the given one, or a new one); ``step`` returns its outputs.

        It may come at any time between steps. ``priority``: smaller is more urgent, under policy="priority".

        Raises ValueError for a prompt that can't be served, or an id that is in use or no string.
        """
        self._check_open()
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} is a {type(request_id).__name__}; give a string or None")
        parsed = parse_prompt(prompt, self._encode, self.model_config.vocab_size, "prompt")
        wish = self._wish(self._parse_params(sampling_params, 1)[0])
        urgency = parse_priorities(priority, 1, self.config.policy)[0]
        with self._lock, deferred_interrupts():
            if request_id is not None and self._in_use(request_id, wish.params.n):
                raise ValueError(f"request_id={request_id!r} is in use: wait for its end, abort it, or take another id")
            return self._add(parsed, wish, urgency, request_id=request_id, online=True).request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests with new tokens or an end, each as its ``output_kind`` says."""
        self._check_open()
        with self._lock, deferred_interrupts() as interrupts:
            if self._scheduler.has_unfinished() or self._in_flight:
                self._advance()
            interrupts.deliver()  # before the news is handed out: the next step still has it
            news = [(tracked, tracked.output()) for tracked in self._changed.values() if tracked.has_news]
            if not interrupts:  # else nobody receives them
                self._changed = {}
                for tracked, output in news:
                    tracked.mark_sent(output)
                    if output.finished:
                        self._drop(tracked)
            return [output for _, output in news]

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished() or bool(self._changed)

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the present state: plain numbers, but for ``attention_backend``.

        That is the name of the backend that runs the decode attention ("xla" where "auto" or "triton" gave way).
        """
        return startup.stats(self._scheduler, self._executor, self.start_seconds)

    def close(self) -> None:
        """Gives the device memory back; any later call raises RuntimeError."""
        with self._lock, deferred_interrupts():
            try:
                self._write_recording()
            finally:
                self._closed = self._closed or "the engine is closed"  # an earlier error stays the reason
                self._in_flight.clear()
                self._say_end()
                self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The loop

    def _advance(self) -> list[Request]:
        """Schedules and dispatches one step, then commits the oldest one in flight; returns who finished."""
        try:
            scheduled = self._scheduler.counters.steps
            self._group.tell_step(scheduled, self._in_flight[0][0].number if self._in_flight else scheduled)
            step = self._scheduler.schedule()
            if step is not None:
                bucket = self.buckets.pick(step)
                buffer = fill_plan(step, self._scheduler, self._executor.layout(bucket))
                self._group.saw(buffer)
                words = self._processing.words(step, self._scheduler.rows, bucket, buffer)
                self._in_flight.append((step, self._executor.dispatch(bucket, buffer, words)))
                if step.first_samples and self._num_watched:
                    self._read_prompts(step)
            finished: list[Request] = []
            keep = self.config.async_steps if step is not None else 0
            while len(self._in_flight) > keep:
                finished += self._commit(*self._in_flight.popleft())
            return finished
        except BaseException as error:  # also an exit out of a signal handler: the books may be half written
            self._stop(error)
            raise

    def _commit(self, step: ScheduledStep, handle: StepHandle) -> list[Request]:
        self._group.wait(handle.tokens)
        finished = self._scheduler.commit(step, handle.result()[: len(step.requests)])  # waits
        if not self._num_watched:
            return finished
        numbers = None
        for i in step.samples.nonzero()[0].tolist():
            request = step.requests[i]
            completion = self._completions.get(request.request_id)
            # the id may be another request's by now: this one was aborted, and its token comes too late
            if completion is None or completion.request is not request:
                continue
            self._wait_for_prompt(completion.tracked)
            if completion.misses_logprobs:
                numbers = handle.logprobs_result() if numbers is None else numbers
                completion.add_logprobs(numbers[0][i], numbers[1][i])
            if completion.watches_text and (stop := completion.read()) is not None:
                if request.finish_reason is None:
                    finished.append(request)
                self._scheduler.stop(request, stop)
            if completion.tracked.online:
                self._changed[completion.tracked.request_id] = completion.tracked
        return finished

    def _read_prompts(self, step: ScheduledStep) -> None:
        """Dispatches prompt_logprobs for those whose prompts are in the cache as of this step."""
        for i in step.first_samples:
            completion = self._completions.get(step.requests[i].request_id)
            if completion is not None and completion.request is step.requests[i] and completion.misses_prompt:
                parts = scoring.prompt_logprobs(self._executor, self.buckets, self.config, completion.request)
                completion.tracked.prompt_parts = parts


LLM = Engine
