"""What is true of a scheduler between any two calls: the invariants, in one place, checked by brute force."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxvllm.core.request import RequestStatus

if TYPE_CHECKING:
    from jaxvllm.core.queues import Queues


def check_scheduler(queues: Queues) -> None:
    """AssertionError that names the first invariant that doesn't hold."""
    holders = queues.rows.holders()
    queues.pool.check_integrity([request.block_table for request in holders])
    _check_membership(queues)
    _check_rows(queues)
    for request in holders:
        slots = len(request.block_table) * queues.block_size
        who = repr(request)
        _check(0 <= request.num_computed <= request.num_tokens, f"{who} computed more than it has")
        _check(request.num_computed <= slots, f"{who} computed more than its {slots} slots")
        _check(request.num_known <= request.num_tokens, f"{who} knows more than it has")
        _check(request.num_tokens <= request.token_limit, f"{who} is beyond its limit {request.token_limit}")
        if request.status is RequestStatus.RUNNING:
            _check(request.num_computed < request.num_tokens, f"{who} runs but has nothing to compute")
        if queues.rows.decoding[request.row] or request.num_in_flight:
            _check(request.num_computed == request.num_tokens - 1, f"{who} decodes but isn't one token behind")


def _check_membership(queues: Queues) -> None:
    """Every unfinished request is in exactly one queue, and a running one has a row."""
    members = [*queues.waiting, *queues.running]
    _check(len({id(request) for request in members}) == len(members), "a request is queued twice")
    _check({id(r) for r in members} == {id(r) for r in queues.requests.values()}, "queues and ids disagree")
    for request in queues.waiting:
        _check(request.status is RequestStatus.WAITING, f"{request!r} is in the waiting queue")
    for request in queues.running:
        _check(request.status is RequestStatus.RUNNING, f"{request!r} is in the running queue")
        _check(request.row >= 0, f"{request!r} runs without a row")
    _check({r.row for r in members if r.row >= 0} == {r.row for r in queues.rows.holders()}, "rows leak")
    _check(queues.runnable_rows().tolist() == _runnable(queues), "the rows of the running queue are stale")


def _runnable(queues: Queues) -> list[int]:
    return [request.row for request in queues.running if request.num_tokens < request.token_limit]


def _check_rows(queues: Queues) -> None:
    """Rows point to their requests and back; what isn't part of a table is 0."""
    rows = queues.rows
    for row in range(rows.num_rows):
        request = rows.request[row]
        if request is None:
            _check(rows.num_blocks[row] == 0, f"free row {row} has blocks")
        else:
            _check(request.row == row and request.rows is rows, f"row {row} isn't {request!r}'s")
        _check(not np.any(rows.block_tables[row, rows.num_blocks[row] :]), f"row {row} has stale block ids")


def _check(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise AssertionError(message)
