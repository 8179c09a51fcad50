"""The scheduler: two queues, one pool, and a step at a time.

    add --> waiting --[prompt fits: blocks and a row]--> running --[end token or limit]--> finished
               ^                                           |
               +------ preempted: blocks and row back -----+        (before all newcomers, or by its priority)

Owns the order of events: what a step is, and what its tokens change. Must not know about devices, text, or
how its decisions are encoded for a step (`plan` reads them from here). Who runs is the policy's business
(`policy`); how a request moves is the queues' (`queues`).

The loop around it may run ahead: it may schedule and dispatch step n + 1 before it commits the tokens of
step n.

    schedule n    schedule n+1   commit n    schedule n+2   commit n+1
    --------------------------------------------------------------------->
         dispatch: device runs n, n+1, ... in this order, always

Hence the rules: a token in flight counts as a token, but its id is unknown until its commit; a block is
published only when the ids in it are known; a commit finds a request wherever it stands by then, also
preempted or gone; and blocks and rows that come back can be given away at once, because whatever the device
still writes there for their old holder, it writes before it runs the new holder's first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxvllm.core.block_pool import BlockPool, Publish
from jaxvllm.core.integrity import check_scheduler
from jaxvllm.core.policy import POLICIES, rule_problems
from jaxvllm.core.queues import Queues
from jaxvllm.core.request import Request, RequestStatus
from jaxvllm.core.rules import Rules
from jaxvllm.core.step import ScheduledStep


class Scheduler(Queues):
    """Decides each step and takes in its tokens. All sizes in tokens, requests or blocks; see the module."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_running: int | None = None,
        scheduling_policy: str = "prefill_first",
        rules: Rules | None = None,
        enable_prefix_caching: bool = True,
        publish: Publish = "after_write",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_num_seqs` and `max_num_batched_tokens` bound one step of prefill_first (the latter only its prompt
        tokens); under running_first the one bounds who runs, the other all tokens of a step.

        `max_running` bounds the requests that hold a row; None: only the pool does. `publish`: see BlockPool.
        `clock`: seconds, for the times of requests.
        """
        for name, value, least in (
            ("block_size", block_size, 1),
            ("num_blocks", num_blocks, 1),
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
            ("max_running", 1 if max_running is None else max_running, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        rules = rules or Rules()
        problems = rule_problems(scheduling_policy, rules)
        policy = POLICIES.get(scheduling_policy)
        if policy is None or problems:
            raise ValueError("; ".join(problems))
        longest = min(max_model_len, num_blocks * block_size + 1) - 1
        if not rules.enable_chunked_prefill and max_num_batched_tokens < longest:
            raise ValueError(
                f"enable_chunked_prefill=False keeps prompts whole, so max_num_batched_tokens={max_num_batched_tokens} "
                f"must be at least {longest}, the tokens that a preempted request may have to compute again: raise it, "
                "or lower max_model_len"
            )
        if publish == "at_allocation" and scheduling_policy != "running_first":
            raise ValueError("publish='at_allocation' replays vLLM's schedules: it is for 'running_first' only")
        super().__init__(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_running=max_running,
            pool=BlockPool(
                num_blocks, block_size, enable_prefix_caching, policy.free_list, policy.prefix_table, publish
            ),
            rules=rules,
            clock=clock,
        )
        self._pick = policy.pick
        self._num_added = 0
        self._next_commit = 0  # number of the next step to commit
        # int32, sorted: every id that ends some request seen so far. A commit looks closer only at these.
        self._end_tokens = np.zeros(0, np.int32)

    @property
    def num_waiting(self) -> int:
        """Requests that are not running; under prefill_first one between two chunks of its prompt is among them."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that decode; under running_first also those whose prompt is being computed."""
        return len(self.running)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def check_room(self, num_prompt: int, who: str) -> None:
        """ValueError if a prompt of so many tokens can never be served."""
        num_slots = self.pool.num_blocks * self.block_size
        if num_prompt < 1:
            raise ValueError(f"{who} has an empty prompt; at least 1 token is needed to predict the next")
        if num_prompt > self.max_model_len - 1:
            raise ValueError(
                f"{who} has a prompt of {num_prompt} tokens, but max_model_len={self.max_model_len} leaves "
                f"room for {self.max_model_len - 1} and 1 new token; shorten it or raise max_model_len"
            )
        if num_prompt > num_slots:
            raise ValueError(
                f"{who} has a prompt of {num_prompt} tokens, but the cache holds {num_slots} "
                f"({self.pool.num_blocks} blocks of {self.block_size}); shorten it or raise num_blocks"
            )

    def add(self, request: Request) -> None:
        """Put `request` into the waiting queue. ValueError if it can never be served."""
        num_prompt, who = request.num_prompt, f"request {request.request_id!r}"
        if request.request_id in self.requests:
            raise ValueError(f"{who} is already being served; give every request its own request_id")
        if request.status is not RequestStatus.WAITING or request.num_admissions:
            raise ValueError(f"{who} is {request.status.name} already; make a new Request")
        self.check_room(num_prompt, who)
        max_new = request.params.max_tokens
        limit = self.max_tokens if max_new is None else num_prompt + max_new
        request.token_limit = min(limit, self.max_tokens)
        if not request.eos_token_ids.issubset(self._end_tokens.tolist()):
            ids = [token for token in request.eos_token_ids if 0 <= token < 2**31]  # others are never sampled
            self._end_tokens = np.union1d(self._end_tokens, np.array(ids, np.int32))
        request.arrival = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step, and count its tokens as computed. It must be dispatched, and later committed.

        None: nothing can run now, because nobody is left, or everybody waits for tokens in flight (commit them), or
        somebody was preempted (`preempted_now`) and the others can go on in the next step.
        """
        self.preempted_now, self.admitted_now = [], []
        picks = self._pick(self)
        if picks is None:
            if self.requests and self._next_commit == self.counters.steps and not self.preempted_now:
                raise AssertionError(f"nothing in flight and nobody can run: {list(self.requests.values())}")
            return None
        rows, state = picks.rows, self.rows
        starts = state.num_computed[rows]
        ends = starts + picks.num_tokens
        num_tokens = state.num_tokens[rows]
        samples = ends == num_tokens
        first_samples = [] if picks.kind == "decode" else (samples & ~state.decoding[rows]).nonzero()[0].tolist()
        step = ScheduledStep(
            number=self.counters.steps,
            kind=picks.kind,
            requests=state.request[rows].tolist(),
            rows=rows,
            row_epochs=state.epoch[rows],
            starts=starts,
            num_tokens=picks.num_tokens,
            samples=samples,
            preempted=self.preempted_now,
            first_samples=first_samples,
        )
        num_decoding = len(rows) if picks.kind == "decode" else int(np.count_nonzero(state.decoding[rows]))
        self.counters.count(step, num_decoding)
        state.num_computed[rows] = ends
        state.num_tokens[rows] = num_tokens + samples
        if picks.kind != "decode":
            state.decoding[rows] = samples
        return step

    def commit(self, step: ScheduledStep, tokens: np.ndarray) -> list[Request]:
        """Take in the sampled `tokens` (int32[B], ignored where the step doesn't sample) of the oldest open
        step.

        Publishes the blocks that the step filled, appends the tokens, and takes blocks and rows from the
        requests that end. Returns those, in step order.
        """
        if step.number != self._next_commit:
            raise AssertionError(f"step {step.number} committed before step {self._next_commit}")
        if len(tokens) != len(step.requests):
            raise AssertionError(f"{len(tokens)} tokens for a step of {len(step.requests)} requests")
        self._next_commit += 1
        state = self.rows
        same = state.epoch[step.rows] == step.row_epochs  # still in the row where it was scheduled
        if self.pool.publish_when == "after_write":
            self._publish_filled(step, same)
        if step.first_samples:
            self._note_first_tokens(step)

        live = (same & step.samples).nonzero()[0]
        rows, new = step.rows[live], np.asarray(tokens, np.int32)[live]
        num_known = state.num_known[rows]
        state.tokens[rows, num_known] = new
        num_known += 1
        state.num_known[rows] = num_known
        self.counters.output_tokens += len(live)

        maybe_ends = num_known >= state.token_limit[rows]
        if len(self._end_tokens):
            nearest = self._end_tokens.searchsorted(new)
            maybe_ends |= self._end_tokens.take(nearest, mode="clip") == new
        look_at = live[maybe_ends].tolist()
        if len(live) < len(same):
            stale = (~same & step.samples).nonzero()[0].tolist()
            for i in stale:
                self._append_detached(step.requests[i], int(tokens[i]))
            look_at = sorted(look_at + stale)
        return self._finish(step, tokens, look_at)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, wherever it stands. Tokens in flight for it are discarded when they come.

        Returns it, or None if no unfinished request has this id.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        self.end(request, "abort")
        self.counters.aborted_requests += 1
        return request

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests admitted from now on are cached again."""
        self.pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """AssertionError unless queues, rows, tables and pool agree. Slow: for tests and idle times."""
        check_scheduler(self)

    def _publish_filled(self, step: ScheduledStep, same: np.ndarray) -> None:
        """Publish the blocks that this step filled, for requests that are still where they were (`same`,
        bool[B]).

            |- block 0 -|- block 1 -|- block 2 -|
                   start|== step ========|end         fills blocks start // size .. end // size - 1 (here 1)

        The step's inputs are all known now: the last of them was sampled by a step that is committed already.
        """
        ends = step.starts + step.num_tokens
        # It crossed a border if fewer tokens lie past the last border than were computed.
        filled = ends % self.block_size < step.num_tokens
        for i in (filled & same).nonzero()[0].tolist():
            self._publish(step.requests[i], int(step.starts[i]), int(ends[i]))

    def _note_first_tokens(self, step: ScheduledStep) -> None:
        """The time of each request's first token; one that was preempted had it before."""
        now = self.clock()
        for i in step.first_samples:
            if not step.requests[i].first_token_time:
                step.requests[i].first_token_time = now

    def _append_detached(self, request: Request, token: int) -> None:
        """A token for a request that is not where the step left it: gone, or preempted and still waiting."""
        if request.status is RequestStatus.FINISHED:
            self.counters.discarded_tokens += 1
            return
        if request.row >= 0 or request.detached_in_flight < 1:
            raise AssertionError(f"{request} was admitted again with a token in flight")
        request.detached_output = np.append(request.detached_output, np.int32(token))
        request.detached_in_flight -= 1
        self.counters.output_tokens += 1

    def _finish(self, step: ScheduledStep, tokens: np.ndarray, look_at: list[int]) -> list[Request]:
        """End those of the step's requests number `look_at` whose new token is their last one."""
        ended: list[tuple[Request, str, int | str | None]] = []
        for i in look_at:
            request, token = step.requests[i], int(tokens[i])
            if request.status is RequestStatus.FINISHED:
                continue
            if token in request.eos_token_ids:
                ended.append((request, "stop", token if token in request.user_stop_ids else None))
            elif request.num_known >= request.token_limit:
                ended.append((request, "length", None))
        self.end_all(ended)
        self.counters.finished_requests += len(ended)
        return [request for request, _, _ in ended]
