"""The two queues, and everything that moves a request between them.

Owns waiting, running, the rows and the pool, and keeps them in step: a request gains its row and first blocks in
`admit` and loses them in `preempt`, `restart` or `end`, nowhere else. A policy decides with the operations here. Must
not know about steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxvllm.core.block_pool import BlockPool
from jaxvllm.core.request import Request, RequestStatus
from jaxvllm.core.rows import Rows
from jaxvllm.core.rules import Rules
from jaxvllm.core.step import Counters
from jaxvllm.core.waiting import WAITING

_INITIAL_ROWS = 16  # without max_running; the arrays double from here


class Queues:
    """Who waits (from the head), who runs (in order of admission), in which rows and blocks."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_running: int | None,
        pool: BlockPool,
        rules: Rules,
        clock: Callable[[], float],
    ) -> None:
        num_blocks, block_size = pool.num_blocks, pool.block_size
        self.block_size = block_size
        self.rules = rules
        self.clock = clock
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        # The last token of a request is sampled and never computed, so it needs no slot.
        self.max_tokens = min(max_model_len, num_blocks * block_size + 1)
        self.table_width = self._num_blocks_for(self.max_tokens - 1)  # blocks of the longest request

        self.pool = pool
        num_rows = _INITIAL_ROWS if max_running is None else max_running
        self.rows = Rows(num_rows, self.table_width, self.max_tokens, growable=max_running is None)
        self.waiting = WAITING[rules.policy]()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}  # all unfinished ones, by id
        self.counters = Counters()
        self._running_rows = np.zeros(0, np.intp)  # the rows of `running`, in its order
        # By the schedule() that is going on, or was the last one; in the order in which it happened.
        self.preempted_now: list[Request] = []
        self.admitted_now: list[Request] = []

    # Admission

    def find_room(self, request: Request) -> list[int] | None:
        """The cached blocks with which waiting `request` could start, or None if it can't be admitted now.

        It needs all its tokens' ids, a row, and free blocks for all of its known tokens.
        """
        if request.num_in_flight or not self.rows.has_free:
            return None
        cached = self.find_prefix(request)
        return cached if self.has_room(request.num_known, cached) else None

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks with which waiting `request` would start, were there room for the rest."""
        return self.pool.match(request.known_tokens(), request.block_hashes)

    def has_room(self, num_tokens: int, cached: Sequence[int]) -> bool:
        """Whether blocks for `num_tokens` tokens that begin with those in `cached` can be had.

        A cached block in use by others costs nothing; a free one has to be taken from the free list, like a new one.
        """
        num_shared = sum(map(self.pool.in_use, cached))
        return self._num_blocks_for(num_tokens) - num_shared <= self.pool.num_free

    def admit(self, request: Request, cached: list[int], num_tokens: int | None = None) -> None:
        """Give `request` a row, and blocks for its first `num_tokens` tokens (None: all it has): `cached`, from
        find_prefix, then new ones."""
        num_known, num_cached = request.num_known, len(cached) * self.block_size
        num_tokens = num_known if num_tokens is None else num_tokens
        self.pool.hold(cached)  # before take: a free cached block must not be taken for something else
        blocks = cached + self.pool.take(self._num_blocks_for(num_tokens) - len(cached))
        self.rows.assign(request, blocks, num_cached)
        request.cache_generation = self.pool.generation
        request.num_cached_tokens = num_cached
        if request.num_admissions == 0:
            request.first_cached_tokens = num_cached
            request.admitted_time = self.clock()
        request.num_admissions += 1
        self.admitted_now.append(request)
        self.counters.prefix_queried_tokens += num_known
        self.counters.prefix_hit_tokens += num_cached
        num_recomputed = max(0, request.num_lost - num_cached)
        request.num_recomputed += num_recomputed
        self.counters.recomputed_tokens += num_recomputed
        self._announce(request, num_cached, num_tokens)

    def must_wait(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether another request is computing blocks with which `request` could start, beyond those in `cached`.

        Each wait is for a longer prefix than the last one, and ends with its writer's prompt, or with the writer. So a
        request can't wait forever.
        """
        if not (self.rules.share_prefixes or request.has_siblings):
            return False
        end = self.pool.expected_end(request.known_tokens(), request.block_hashes, len(cached))
        if end <= max(len(cached), request.num_awaited):
            return False
        request.awaited, request.num_awaited = request.block_hashes[end - 1], end
        self.counters.prefix_waits += 1
        return True

    def still_waits(self, request: Request) -> bool:
        """Whether what `must_wait` saw is still going on; cheap."""
        if request.awaited is not None and not self.pool.is_expected(request.awaited):
            request.awaited = None
        return request.awaited is not None

    def start_running(self, request: Request, place: int = 0) -> None:
        """Move the waiting queue's request number `place` to the end of the running queue."""
        if self.waiting[place] is not request:
            raise AssertionError(f"{request} isn't number {place} of the waiting queue")
        del self.waiting[place]
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._running_rows = np.append(self._running_rows, request.row)

    # Blocks of those who run

    def runnable_rows(self) -> np.ndarray:
        """intp[n]: rows of the running requests, in order, without those whose last token is in flight."""
        rows = self._running_rows
        open_ended = self.rows.num_tokens[rows] < self.rows.token_limit[rows]
        return rows if np.count_nonzero(open_ended) == len(rows) else rows[open_ended]

    def needs_block(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: whether a row's tokens outgrow its blocks, so that the next one to compute has no slot.

        Tokens in flight count. (The usual test, num_tokens % block_size == 1, never fires at block size 1.)
        """
        return self.rows.num_tokens[rows] > self.rows.num_blocks[rows] * self.block_size

    def missing_blocks(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """int32[n]: blocks that each of `rows` lacks to compute its next `num_tokens` (int32[n]) tokens."""
        ends = self.rows.num_computed[rows] + num_tokens
        return np.maximum(-(-ends // self.block_size) - self.rows.num_blocks[rows], 0)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """The same for one request."""
        return max(0, self._num_blocks_for(request.num_computed + num_tokens) - int(self.rows.num_blocks[request.row]))

    def append_blocks(self, rows: np.ndarray) -> None:
        """One more block for each of `rows`."""
        if len(rows):
            self.rows.block_tables[rows, self.rows.num_blocks[rows]] = self.pool.take(len(rows))
            self.rows.num_blocks[rows] += 1

    def grow(self, rows: np.ndarray, num_tokens: np.ndarray, missing: np.ndarray) -> None:
        """Give each of `rows` the blocks for its next `num_tokens` tokens, of which it lacks `missing` (each [n])."""
        lacking = missing > 0
        if lacking.any():
            if missing.max() == 1:
                self.append_blocks(rows[lacking])
            else:
                self._append(rows[lacking], missing[lacking])
        if self.pool.publish_when == "at_allocation":
            starts = self.rows.num_computed[rows]
            for row, start, end in zip(rows.tolist(), starts.tolist(), (starts + num_tokens).tolist(), strict=True):
                self._publish(self.rows.request.item(row), start, end)

    def _append(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """`counts` (at least 1 each) more blocks for `rows`, in this order."""
        state = self.rows
        at = np.repeat(state.num_blocks[rows], counts)
        at += np.arange(len(at)) - np.repeat(counts.cumsum() - counts, counts)
        state.block_tables[np.repeat(rows, counts), at] = self.pool.take(len(at))
        state.num_blocks[rows] += counts

    def grow_one(self, request: Request, num_tokens: int) -> None:
        """The same for one request."""
        rows, counts = np.array([request.row], np.intp), np.array([num_tokens], np.int32)
        self.grow(rows, counts, self.missing_blocks(rows, counts))

    # Leaving

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait; its blocks and its row are free again.

        What it computed is lost, except for what it finds in the prefix cache when it is admitted again.
        """
        self._stop_running([request])
        request.num_lost = request.num_computed
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        if self.pool.publish_when == "at_allocation":  # it may have been scheduled in this very step
            self.pool.withdraw(request.block_table[request.num_computed // self.block_size :])
        self._release(request)
        self.waiting.put_back(request)
        self.preempted_now.append(request)
        self.counters.preemptions += 1

    def restart(self, request: Request) -> None:
        """Back to wait as if it had just been added: outputs, blocks and row are gone. No step may be in flight."""
        if request.status is RequestStatus.RUNNING:
            self.preempt(request)
        elif request.row >= 0:  # between two chunks
            self._release(request)
        request.detached_output = request.detached_output[:0]
        request.num_lost = request.num_awaited = 0
        request.awaited, request.first_token_time = None, 0.0
        del request.block_hashes[request.num_prompt // self.block_size :]

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request whose text has come to the stop string `stop_reason`, also if that token was its last."""
        if request.status is RequestStatus.FINISHED:
            request.finish_reason, request.stop_reason = "stop", stop_reason
        else:
            self.end(request, "stop", stop_reason)
            self.counters.finished_requests += 1

    def end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish a request that waits or runs; its blocks and its row, if it has any, are free again."""
        self.end_all([(request, reason, stop_reason)])

    def end_all(self, ended: Sequence[tuple[Request, str, int | str | None]]) -> None:
        """Finish several requests, each with its finish_reason and stop_reason; blocks come back in this order."""
        if not ended:
            return
        self._stop_running([request for request, _, _ in ended if request.status is RequestStatus.RUNNING])
        now = self.clock()
        for request, reason, stop_reason in ended:
            if request.status is RequestStatus.WAITING:
                self.waiting.remove(request)
            if request.row >= 0:
                self._release(request)
            request.status = RequestStatus.FINISHED
            request.detached_in_flight = 0  # what still comes is discarded
            request.finish_reason, request.stop_reason = reason, stop_reason
            request.finished_time = now
            del self.requests[request.request_id]

    def _stop_running(self, requests: list[Request]) -> None:
        """Out of the running queue, in one pass however many they are."""
        if len(requests) == 1:
            self.running.remove(requests[0])
            self._running_rows = self._running_rows[self._running_rows != requests[0].row]
        elif requests:
            gone = set(requests)
            self.running[:] = [request for request in self.running if request not in gone]
            self._running_rows = np.array([request.row for request in self.running], np.intp)

    def _release(self, request: Request) -> None:
        """Its row and blocks are free again, and nobody waits for what it was computing."""
        self.pool.release(self.rows.release(request))
        self.pool.expect_no_more(request.arrival)

    def _announce(self, request: Request, start: int, end: int) -> None:
        """Tell the pool about the full blocks of known tokens that `request`, just admitted, is going to write."""
        if self.pool.publish_when == "at_allocation":
            self._publish(request, start, end)
        elif self.rules.share_prefixes or request.has_siblings:
            first, last = start // self.block_size, request.num_known // self.block_size
            self.pool.expect(request.arrival, first, last, request.known_tokens(), request.block_hashes)

    def _publish(self, request: Request, start: int, end: int) -> None:
        """Publish the blocks of `request` that are full once its tokens start .. end are computed."""
        if request.cache_generation != self.pool.generation:
            return
        first, last = start // self.block_size, end // self.block_size
        blocks = self.rows.block_tables[request.row, first:last].tolist()
        self.pool.publish(blocks, first, self.rows.tokens[request.row], request.block_hashes)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
