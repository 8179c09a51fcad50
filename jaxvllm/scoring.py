"""Log-probabilities of given tokens: ``Engine.score`` and prompt_logprobs, in chunks over the paged cache.

Part of the engine's room. Owns: the plans of such chunks. Must not know: how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxvllm.config import EngineConfig
from jaxvllm.core.buckets import Bucket, BucketTable
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.runtime.executor import Executor


def score(executor: Executor, scheduler: Scheduler, buckets: BucketTable, engine: EngineConfig,
          ids: np.ndarray, between_chunks: Callable[[], None], wait: Callable[[jax.Array], None]
          ) -> np.ndarray:  # fmt: skip
    """``Engine.score``: ids int32 [n] in chunks of the token budget over borrowed blocks; float32 [n - 1].

    wait: returns when an array is there, or raises where it never will be (another process has failed).
    """
    blocks = scheduler.pool.take(check(scheduler, engine, ids))
    try:
        parts = []
        for bucket, buffer, targets, size in chunks(executor, buckets, engine, ids, np.asarray(blocks), writes=True):
            logprobs = executor.score(bucket, buffer, targets)
            wait(logprobs)
            parts.append(np.asarray(logprobs)[:size])
            between_chunks()
        return np.concatenate(parts)
    finally:
        scheduler.pool.release(blocks)


def check(scheduler: Scheduler, engine: EngineConfig, ids: np.ndarray) -> int:
    """The blocks that scoring ids [n] needs; ValueError where they can't be had."""
    assert engine.max_model_len is not None
    if not 2 <= ids.size <= engine.max_model_len:
        raise ValueError(
            f"token_ids has {ids.size} ids; scoring takes 2 to max_model_len={engine.max_model_len}: "
            "split the text, or raise max_model_len"
        )
    needed = -(-(ids.size - 1) // engine.block_size)  # the last id is only a target: it needs no slot
    if needed > scheduler.pool.num_free:
        raise ValueError(
            f"scoring {ids.size} ids needs {needed} free blocks, but {scheduler.pool.num_free} are free: "
            "let running requests finish, or raise num_blocks"
        )
    return needed


def prompt_logprobs(executor: Executor, buckets: BucketTable, engine: EngineConfig, request: Request
                    ) -> list[tuple[Any, Any]]:  # fmt: skip
    """Of a request whose whole prompt lies in its blocks: [(float32, int32 [t, 1 + max_logprobs]), ...], t in all
    num_prompt - 1; the arrays may still be on their way.

    The prompt is read again in chunks against its own cache entries, and nothing is written. So the result doesn't
    depend on how the prompt was computed: in which chunks, from the prefix cache, or after a preemption.
    """
    blocks = np.asarray(request.block_table)
    parts = []
    for bucket, buffer, targets, size in chunks(
        executor, buckets, engine, request.prompt_token_ids, blocks, writes=False
    ):
        numbers, ids = executor.prompt_logprobs(bucket, buffer, targets)
        parts.append((numbers[:size], ids[:size]))
    return parts


def chunks(executor: Executor, buckets: BucketTable, engine: EngineConfig, ids: np.ndarray, blocks: np.ndarray, *,
           writes: bool) -> Iterator[tuple[Bucket, np.ndarray, np.ndarray, int]]:  # fmt: skip
    """(bucket, plan, targets int32 [T], tokens) for each chunk of ids int32 [n] without the last, in ``blocks``.

    The target of a token is the next one. writes=False: all slots lie past the cache's end.
    """
    inputs, size = ids[:-1], engine.block_size
    for start in range(0, inputs.size, engine.max_num_batched_tokens):
        chunk = inputs[start : start + engine.max_num_batched_tokens]
        bucket = buckets.fit("ragged", chunk.size)
        layout = executor.layout(bucket)
        buffer = layout.empty()
        plan = layout.views(buffer)
        positions = np.arange(start, start + chunk.size, dtype=np.int32)
        plan.token_ids[: chunk.size] = chunk
        plan.positions[: chunk.size] = positions
        if writes:
            plan.slot_mapping[: chunk.size] = blocks[positions // size] * size + positions % size
        plan.context_lens[0] = start + chunk.size
        plan.block_tables[0, : blocks.size] = blocks
        assert plan.query_start is not None and plan.tile_seq is not None and plan.tile_start is not None
        plan.query_start[1:] = chunk.size
        tiles = np.arange(0, chunk.size, layout.query_tile, dtype=np.int32)
        plan.tile_seq[: tiles.size] = 0
        plan.tile_start[: tiles.size] = tiles
        targets = np.zeros(bucket.num_tokens, np.int32)
        targets[: chunk.size] = ids[start + 1 : start + 1 + chunk.size]
        yield bucket, buffer, targets, chunk.size
