"""running_first: no prompt phase and no decode phase, only computed tokens catching up with known ones. vLLM V1's.

One token budget for a step. First the running requests take from it, in order: one token if they decode, a chunk if
their prompt isn't computed yet. What is left goes to waiting requests. So nobody who runs stands still because somebody
came, and a long prompt is spread over the room that decoding leaves.

    budget 12     running [A B C]   A, B decode, C has 20 prompt tokens left      A 1, B 1, C 10
                  waiting [D]       nothing left for D
    next step                                                                     A 1, B 1, C 10
    next step     C now decodes                                                   A 1, B 1, C 1, D 9

Blocks are allotted for the chunk at hand. When they run out the queue's order names a victim (`waiting`), which loses
all of them. The rules of a policy: see `policy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxvllm.core.request import Request
from jaxvllm.core.step import Picks

if TYPE_CHECKING:
    from jaxvllm.core.scheduler import Scheduler


def running_first(scheduler: Scheduler) -> Picks | None:
    """First those who run, then, unless somebody was preempted for them, those who wait.

    A victim's blocks are there for those who run: a newcomer that took them would be the next victim.
    """
    rows = scheduler.runnable_rows()
    only_decoding = len(rows) <= scheduler.max_num_batched_tokens and bool(scheduler.rows.decoding[rows].all())
    num_tokens = _decode_all(scheduler, rows) if only_decoding else None
    if num_tokens is None:
        rows, num_tokens = _serve_running(scheduler, rows)
    elif not scheduler.waiting and len(rows):
        return Picks("decode", rows, num_tokens)
    if scheduler.waiting and not scheduler.preempted_now:
        admitted = _admit_waiting(scheduler, scheduler.max_num_batched_tokens - int(num_tokens.sum()))
        if admitted:
            rows = np.concatenate([rows, [request.row for request, _ in admitted]])
            num_tokens = np.concatenate([num_tokens, [count for _, count in admitted]]).astype(np.int32)
    if not len(rows):
        return None
    num_decoding = np.count_nonzero(scheduler.rows.decoding[rows])
    kind = "decode" if num_decoding == len(rows) else "mixed" if num_decoding else "prefill"
    return Picks(kind, rows, num_tokens)


def _decode_all(scheduler: Scheduler, rows: np.ndarray) -> np.ndarray | None:
    """int32[B], one token for each of `rows`, which all decode; None if there are too few blocks for it.

    What `_serve_running` does, for the usual case, in a third of the time.
    """
    needs_block = scheduler.needs_block(rows)
    if np.count_nonzero(needs_block) > scheduler.pool.num_free:
        return None
    ones = np.ones(len(rows), np.int32)
    scheduler.grow(rows, ones, needs_block)
    return ones


def _serve_running(scheduler: Scheduler, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows intp[B], tokens int32[B]): the share of the budget of each of `rows`, as long as there is any.

    All at once if the free blocks suffice, which is nearly always; one by one if not.
    """
    wanted = scheduler.rows.num_tokens[rows] - scheduler.rows.num_computed[rows]
    threshold, budget = scheduler.rules.long_prefill_token_threshold, scheduler.max_num_batched_tokens
    if threshold:
        wanted = np.minimum(wanted, threshold)
    if wanted.sum() > budget:
        left = budget - (wanted.cumsum() - wanted)  # for each, after those before it
        wanted = np.minimum(wanted, left)
        rows, wanted = rows[left > 0], wanted[left > 0]
    missing = scheduler.missing_blocks(rows, wanted)
    if missing.sum() > scheduler.pool.num_free:
        return _serve_one_by_one(scheduler)
    scheduler.grow(rows, wanted, missing)
    return rows, wanted


def _serve_one_by_one(scheduler: Scheduler) -> tuple[np.ndarray, np.ndarray]:
    """The same when blocks run out: whoever lacks one takes it from a victim, or is the victim.

        running [A B C]   B lacks a block, none is free     fcfs: C goes, B runs     C is B's equal: then B itself
                          priority, A least urgent: A, who has its tokens already, gives them back and goes; B runs

    Who preempts itself ends the pass: those behind it have to wait for the next step. This may leave a step empty
    (under "priority", where the first may be the least urgent); then one request less runs in the next one.
    """
    picks: dict[Request, int] = {}
    threshold, budget = scheduler.rules.long_prefill_token_threshold, scheduler.max_num_batched_tokens
    at = 0
    while at < len(scheduler.running) and budget > 0:
        request = scheduler.running[at]
        num_tokens = min(_capped(request.num_tokens - request.num_computed, threshold), budget)
        if request.num_tokens >= request.token_limit:  # its last token is on its way: skipped
            num_tokens = 0
        while num_tokens and scheduler.num_missing(request, num_tokens) > scheduler.pool.num_free:
            victim = scheduler.waiting.victim(scheduler.running)
            budget += picks.pop(victim, 0)
            at -= scheduler.running.index(victim) < at
            scheduler.preempt(victim)
            if victim is request:
                return _as_arrays(picks)
        if num_tokens:
            scheduler.grow_one(request, num_tokens)
            picks[request] = num_tokens
            budget -= num_tokens
        at += 1
    return _as_arrays(picks)


def _admit_waiting(scheduler: Scheduler, budget: int) -> list[tuple[Request, int]]:
    """Waiting requests in order, each with its first tokens, while budget, places and blocks last.

    One that can't go in this step for reasons of its own (a token in flight, a prefix that another one is computing)
    is skipped; one for which there is no room ends it, and nobody is preempted for it.
    """
    rules = scheduler.rules
    admitted: list[tuple[Request, int]] = []
    at = 0
    while at < len(scheduler.waiting) and budget > 0 and len(scheduler.running) < scheduler.max_num_seqs:
        request = scheduler.waiting[at]
        if request.num_in_flight or scheduler.still_waits(request):
            at += 1
            continue
        cached = scheduler.find_prefix(request)
        if scheduler.must_wait(request, cached):
            at += 1
            continue
        # What the prefix cache holds is counted before the chunk is cut.
        num_cached = len(cached) * scheduler.block_size
        num_tokens = _capped(request.num_tokens - num_cached, rules.long_prefill_token_threshold)
        if num_tokens > budget and not rules.enable_chunked_prefill:
            break
        num_tokens = min(num_tokens, budget)
        end = num_cached + num_tokens
        if not scheduler.rows.has_free or not scheduler.has_room(
            request.num_tokens if rules.reserve_full_prompt else end, cached
        ):
            break
        scheduler.admit(request, cached, end)
        scheduler.start_running(request, at)
        admitted.append((request, num_tokens))
        budget -= num_tokens
    return admitted


def _capped(wanted: int, threshold: int) -> int:
    return min(wanted, threshold) if threshold else wanted


def _as_arrays(picks: dict[Request, int]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.array([request.row for request in picks], np.intp)
    return rows, np.array(list(picks.values()), np.int32)
