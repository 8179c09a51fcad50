"""Helpers of the GPU tests: full logits through the engine's own forward, and a record of what was measured."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvllm import Engine
from jaxvllm.models import qwen3
from jaxvllm.models.layers import head_logits
from jaxvllm.runtime.mesh import TP
from jaxvllm.runtime.step import run_model, unpack


def last_token_logits(llm: Engine, prompts: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [len(prompts), vocab]: one prompt at a time, a ragged bucket, the paged cache and the real kernels."""
    executor, size = llm._executor, llm.config.block_size
    bucket = llm.buckets.fit("ragged", max(len(p) for p in prompts))
    layout = executor.layout(bucket)

    def logits(params: Any, state: Any, buffer: jax.Array) -> tuple[Any, jax.Array]:
        plan = unpack(buffer, layout)
        hidden, kv = run_model(params, state, plan, layout, llm.model_config, executor.backends, TP)
        last = hidden[plan.query_start[1:2] - 1]
        return state.replace(cache=state.cache.replace(kv=kv)), head_logits(qwen3.head_table(params), last)

    compiled = executor.compiler.forward(logits, executor.num_blocks, layout.size)
    rows = []
    for prompt in prompts:
        buffer = layout.empty()
        plan = layout.views(buffer)
        n = len(prompt)
        plan.token_ids[:n] = prompt
        plan.positions[:n] = np.arange(n)
        plan.slot_mapping[:n] = np.arange(n)
        plan.context_lens[0] = n
        plan.block_tables[0, : -(-n // size)] = np.arange(-(-n // size))
        assert plan.query_start is not None and plan.tile_seq is not None and plan.tile_start is not None
        plan.query_start[1:] = n
        tiles = np.arange(0, n, layout.query_tile)
        plan.tile_seq[: tiles.size], plan.tile_start[: tiles.size] = 0, tiles
        executor.state, values = compiled(executor.params, executor.state, buffer)
        rows.append(np.asarray(values)[0, : llm.model_config.vocab_size])
    return np.stack(rows)


def record(rows: Sequence[tuple[str, float, str, float | None]]) -> None:
    """Appends (case, value, unit, floor) to $JAXVLLM_TEST_RECORD/full_size.jsonl as bench rows, when that is set."""
    folder = os.environ.get("JAXVLLM_TEST_RECORD")
    if folder:
        common = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": os.environ.get("JAXVLLM_COMMIT"),
            "command": "make test-gpu",
            "date": time.strftime("%Y-%m-%d"),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "full_size.jsonl").open("a") as file:
            for case, value, unit, floor in rows:
                row = {"bench": "full_size", "case": case, "value": value, "unit": unit, "floor": floor}
                file.write(json.dumps(row | common) + "\n")
