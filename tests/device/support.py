"""Engines over the first layers of the tiny recorded checkpoints, and looks inside them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm import Engine, ModelConfig, SamplingParams, startup
from jaxvllm.config import EngineConfig
from jaxvllm.core.scheduler import Scheduler
from tests.kept_programs import HOST_ONLY, kept_programs

DATA = Path(__file__).parent.parent / "golden_data"
VOCAB = 331
KJV = DATA.parents[1] / "examples" / "tiny-kjv"
KJV_SHAPES: dict[str, Any] = {  # of all tests that run it: its steps take seconds to compile
    "num_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 120, "dtype": "float32",
    "max_logprobs": 3, "enable_processors": True, "many_steps": True,
}  # fmt: skip
# What changes no shape: engines of the usual ones share their programs, whoever asks first.
SAME_PROGRAMS = (HOST_ONLY | {"record"}) - {"num_blocks", "max_num_batched_tokens", "decode_buckets", "token_buckets"}


@functools.cache
def two_layers(name: str) -> Path:
    """A recorded checkpoint without its third layer: a third less to compile and to run.

    Nothing here compares with what was recorded (tests/golden does), and two layers have what any number has: a
    first, a last, one after another. The folder goes with the session's.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=os.environ.get("JAXVLLM_TESTS_DIR")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = json.loads((DATA / name / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(DATA / name / "generation_config.json", folder)
    tensors: dict[str, np.ndarray] = {}
    for file in (DATA / name).glob("*.safetensors"):
        tensors |= load_file(file)
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("model.layers.2.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


MODEL = two_layers("tied_head_dim_differs")
# For tests of what surrounds a step: its one layer is compiled soonest.
ONE_LAYER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "dtype": "float32", "max_position_embeddings": 128,
}  # fmt: skip


@contextlib.contextmanager
def engine_left_clean(pool: int, **options: Any) -> Iterator[Engine]:
    """An engine for many tests with a pool of so many blocks; after the last one all of them are free."""
    with make_engine(pool=pool, **options) as engine:
        yield engine
        engine._scheduler.check_integrity()
        assert engine.stats()["blocks_free"] == pool


def make_engine(model: Path | ModelConfig = MODEL, *, many_steps: bool = False, pool: int | None = None,
                rows: int | None = None, **options: Any) -> Engine:  # fmt: skip
    """Small defaults: four sequences, blocks of 4, two buckets to compile, in their plain variant only.

    What is compiled is shared with other engines of the same shapes (tests/kept_programs.py, also for many_steps).
    pool, rows: the scheduler's blocks and rows, if fewer than the device's num_blocks and max_num_seqs: as in a smaller
    engine, all that it does follows from its own number, but no smaller steps are compiled.
    """
    many_steps |= model == MODEL and options.keys() <= SAME_PROGRAMS
    defaults: dict[str, Any] = {
        "block_size": 4, "num_blocks": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128,
        "enable_processors": False,
    }  # fmt: skip
    chosen = defaults | options
    chosen.setdefault("decode_buckets", (chosen["max_num_seqs"],))
    chosen.setdefault("token_buckets", (chosen["max_num_batched_tokens"],))
    made = startup.make_scheduler

    def smaller(engine: EngineConfig, rules: Any) -> Scheduler:
        return made(
            replace(engine, num_blocks=pool or engine.num_blocks, max_num_seqs=rows or engine.max_num_seqs), rules
        )

    with kept_programs(many_steps=many_steps), pytest.MonkeyPatch.context() as patched:
        patched.setattr(startup, "make_scheduler", smaller)
        return Engine(model, **chosen)


def random_prompts(count: int, *, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def sampled(count: int, *, max_tokens: int = 12) -> list[SamplingParams]:
    """Every third greedy, the others sampled with a seed of their own."""
    return [
        SamplingParams(temperature=0.0 if i % 3 == 0 else 0.9, max_tokens=max_tokens, ignore_eos=True, seed=100 + i)
        for i in range(count)
    ]


def tokens_of(llm: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def kv_of(llm: Engine) -> np.ndarray:
    """The whole cache, on the host: [L, 2, N, Hkv, P, D]."""
    return np.asarray(llm._executor.state.cache.kv)


def poison(llm: Engine) -> None:
    """Fills the whole cache with NaN, as if nothing had ever been written."""
    fill(llm, np.full(kv_of(llm).shape, np.nan), np.asarray(llm._executor.state.last_tokens))


def fill(llm: Engine, kv: np.ndarray, last_tokens: np.ndarray) -> None:
    """Replaces the whole cache, and each row's last token."""
    executor = llm._executor
    state = executor.state
    old = state.cache.kv, state.last_tokens
    new = [jax.device_put(np.array(x, o.dtype), o.sharding) for x, o in zip((kv, last_tokens), old, strict=True)]
    executor.state = state.replace(cache=state.cache.replace(kv=new[0]), last_tokens=new[1])


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of everything that jax compiles meanwhile, by its own account: an engine counts only its steps."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
