"""Engines over the tiny recorded checkpoints, and looks inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvllm import Engine, ModelConfig, SamplingParams
from tests.kept_programs import kept_programs

DATA = Path(__file__).parent.parent / "golden_data"
MODEL = DATA / "tied_head_dim_differs"
VOCAB = 331


def make_engine(model: Path | ModelConfig = MODEL, *, many_steps: bool = False, **options: Any) -> Engine:
    """Small defaults: four sequences, blocks of 4, two buckets to compile, in their plain variant only.

    What is compiled is shared with other engines of the same shapes (tests/kept_programs.py, also for many_steps).
    """
    defaults: dict[str, Any] = {
        "block_size": 4, "num_blocks": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128,
        "enable_processors": False,
    }  # fmt: skip
    chosen = defaults | options
    chosen.setdefault("decode_buckets", (chosen["max_num_seqs"],))
    chosen.setdefault("token_buckets", (chosen["max_num_batched_tokens"],))
    with kept_programs(many_steps=many_steps):
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

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
