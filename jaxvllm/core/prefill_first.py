"""prefill_first: prompts before decoding, never both in one step. The policy of nano-vLLM.

New requests get their first token early, at the price that everybody else stands still for a step. Free blocks are
taken first in, first out. The rules of a policy: see `policy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxvllm.core.request import Request
from jaxvllm.core.step import Picks

if TYPE_CHECKING:
    from jaxvllm.core.scheduler import Scheduler


def prefill_first(scheduler: Scheduler) -> Picks | None:
    """Prompts first; only if none can run, one token for each running request."""
    return _prefill(scheduler) or _decode(scheduler)


def _prefill(scheduler: Scheduler) -> Picks | None:
    """Waiting requests from the head of the queue, while the step has places, token budget and free blocks.

    Strictly in order: the first request that can't go on ends the step, nobody overtakes it. A prompt is
    cut to the remaining budget only if it is the first of its step. It gets the blocks of its whole prompt
    at once, and stays at the head of the queue until its last chunk is scheduled, so that prompts finish
    one after the other:

        budget 1024    [R1 300][R2 400][R3 255]. 69 .      R4 (1200) isn't the first: not cut, it waits
                       [R4 0 .. 1024                 ]     now it is: cut
                       [R4 1024 .. 1200]                   the rest of it
    """
    picks: list[tuple[Request, int]] = []
    budget = scheduler.max_num_batched_tokens
    while scheduler.waiting and len(picks) < scheduler.max_num_seqs and budget > 0:
        request = scheduler.waiting[0]
        if request.row >= 0:  # between two chunks
            cached = None
            num_left = request.num_tokens - request.num_computed
        else:
            cached = None if scheduler.still_waits(request) else scheduler.find_room(request)
            if cached is None or scheduler.must_wait(request, cached):
                break
            # What the prefix cache holds is counted before the chunk is cut.
            num_left = request.num_tokens - len(cached) * scheduler.block_size
        if num_left > budget and picks:
            break
        if cached is not None:
            scheduler.admit(request, cached)
        num_tokens = min(num_left, budget)
        budget -= num_tokens
        picks.append((request, num_tokens))
        if num_tokens == num_left:
            scheduler.start_running(request)
    if not picks:
        return None
    rows = np.array([request.row for request, _ in picks], np.intp)
    return Picks("prefill", rows, np.array([num_tokens for _, num_tokens in picks], np.int32))


def _decode(scheduler: Scheduler) -> Picks | None:
    """One token for each running request, at most `max_num_seqs`, oldest first.

    The token about to be computed needs a slot. Most requests have one left in their last block;
    `needs_block` marks those that don't. While they want more blocks than are free, the tail of the running
    queue is preempted: it came last, so it has the least to lose, and its blocks feed those before it.
    Three endings:

        running [A B C]   C wants a block, 1 is free                     nobody    A B C run
                [A B C]   A wants a block, none is free; C holds 2       the tail  A B run, A in C's block
                [A B C]   C wants a block, none is free; C is the tail   oneself   A B run, C waits

    Taking from the tail until all wishes fit is the same as walking from the head and taking from the tail
    whenever somebody comes up short, and needs no walk.
    """
    rows = scheduler.runnable_rows()[: scheduler.max_num_seqs]
    needs_block = scheduler.needs_block(rows)
    while np.count_nonzero(needs_block) > scheduler.pool.num_free:
        tail = scheduler.running[-1]
        # The tail may not be among the picks: it may be beyond max_num_seqs, or waiting for its last token.
        if rows[-1] == tail.row:
            rows, needs_block = rows[:-1], needs_block[:-1]
        scheduler.preempt(tail)
    if not len(rows):
        return None
    scheduler.append_blocks(rows[needs_block])
    return Picks("decode", rows, np.ones(len(rows), np.int32))
