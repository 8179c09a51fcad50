"""Two processes with a GPU each against one process with both: the same tokens through NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.device.several_processes import Processes

pytestmark = pytest.mark.gpu
SHAPE = {"vocab_size": 151_936, "num_hidden_layers": 4, "head_dim": 128, "max_position_embeddings": 4096,
         "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8}  # fmt: skip
ENGINE = {"block_size": 64, "num_blocks": 60, "max_num_batched_tokens": 128, "max_model_len": 512,
          "token_buckets": (128,), "enable_processors": True}  # fmt: skip


def test_two_processes_with_a_gpu_each() -> None:
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:
        pytest.skip("needs two GPUs")
    options: dict[str, Any] = {"serve": "serve", "model": SHAPE, "engine": ENGINE, "on_gpu": True, "timeout": 280}
    with Processes("run", count=1, devices=2, **options) as alone:
        expected = alone.result(0)
    with Processes("run", count=2, devices=1, **options) as processes:
        found = processes.result(0)
        assert found == expected
        assert processes.result(1) == found["stats"]
