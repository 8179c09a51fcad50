"""The two queues, and everything that moves a request between them.

Owns waiting, running, the rows and the pool, and keeps them in step: a request gains its row and blocks in
`admit` and loses them in `preempt` or `end`, nowhere else. A policy decides with the operations here. Must
not know about steps.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxvllm.core.block_pool import BlockPool
from jaxvllm.core.request import Request, RequestStatus
from jaxvllm.core.rows import Rows
from jaxvllm.core.step import Counters

_INITIAL_ROWS = 16  # without max_running; the arrays double from here


class Queues:
    """Who waits (from the head), who runs (oldest first), in which rows and blocks."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_running: int | None,
        enable_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        # The last token of a request is sampled and never computed, so it needs no slot.
        self.max_tokens = min(max_model_len, num_blocks * block_size + 1)
        self.table_width = self._num_blocks_for(self.max_tokens - 1)  # blocks of the longest request

        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        num_rows = _INITIAL_ROWS if max_running is None else max_running
        self.rows = Rows(num_rows, self.table_width, self.max_tokens, growable=max_running is None)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}  # all unfinished ones, by id
        self.counters = Counters()
        self._running_rows = np.zeros(0, np.intp)  # the rows of `running`, in its order
        self._preempted: list[Request] = []  # by the schedule() that is going on

    def find_room(self, request: Request) -> list[int] | None:
        """The cached blocks with which waiting `request` could start, or None if it can't be admitted now.

        It needs all its tokens' ids, a row, and free blocks for all of its known tokens. A cached block in
        use by others costs nothing; a free one has to be taken from the free list, like a new one.
        """
        if request.num_in_flight or not self.rows.has_free:
            return None
        known = request.known_tokens()
        cached = self.pool.match(known, request.block_hashes)
        num_shared = sum(map(self.pool.in_use, cached))
        if self._num_blocks_for(len(known)) - num_shared > self.pool.num_free:
            return None
        return cached

    def admit(self, request: Request, cached: list[int]) -> None:
        """Give `request` a row, and blocks for all its known tokens: `cached`, from find_room, then new ones."""
        num_known, num_cached = request.num_known, len(cached) * self.block_size
        self.pool.hold(cached)  # before take: a free cached block must not be taken for something else
        blocks = cached + self.pool.take(self._num_blocks_for(num_known) - len(cached))
        self.rows.assign(request, blocks, num_cached)
        request.cache_generation = self.pool.generation
        request.num_cached_tokens = num_cached
        if request.num_admissions == 0:
            request.first_cached_tokens = num_cached
        request.num_admissions += 1
        self.counters.prefix_queried_tokens += num_known
        self.counters.prefix_hit_tokens += num_cached
        self.counters.recomputed_tokens += max(0, request.num_lost - num_cached)

    def start_running(self, request: Request) -> None:
        """Move the head of the waiting queue, whose last chunk is being scheduled, to the running queue."""
        head = self.waiting.popleft()
        if head is not request:
            raise AssertionError(f"{request} isn't the head of the waiting queue")
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._running_rows = np.append(self._running_rows, request.row)

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

    def append_blocks(self, rows: np.ndarray) -> None:
        """One more block for each of `rows`."""
        if len(rows):
            self.rows.block_tables[rows, self.rows.num_blocks[rows]] = self.pool.take(len(rows))
            self.rows.num_blocks[rows] += 1

    def preempt(self, request: Request) -> None:
        """Send a running request back to the head of the waiting queue; its blocks and its row are free again.

        What it computed is lost, except for what it finds in the prefix cache when it is admitted again.
        """
        self._stop_running(request)
        request.num_lost = request.num_computed
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.pool.release(self.rows.release(request))
        self.waiting.appendleft(request)
        self._preempted.append(request)
        self.counters.preemptions += 1

    def end(self, request: Request, reason: str, stop_reason: int | None = None) -> None:
        """Finish a request that waits or runs; its blocks and its row, if it has any, are free again."""
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            self.waiting.remove(request)
        if request.row >= 0:
            self.pool.release(self.rows.release(request))
        request.status = RequestStatus.FINISHED
        request.detached_in_flight = 0  # what still comes is discarded
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self.requests[request.request_id]

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._running_rows = self._running_rows[self._running_rows != request.row]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
