"""The all-reduce in the norms' kernel on real GPUs of one host (make test-gpu): sums, repetitions, whole engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxvllm import Engine, ModelConfig, SamplingParams
from jaxvllm.kernels.exchange_mosaic import all_reduce_add_rms_norm
from jaxvllm.runtime.exchange import Exchange, allocate_exchange
from jaxvllm.runtime.mesh import TP, make_mesh, spmd

pytestmark = pytest.mark.gpu
SHARDS = [2, 4, 8]
CAPACITY, MAX_SEQS, EPS = 512, 300, 1e-6
TURNS = 0, 1, 0, 2, 0, 1, 2  # none twice in a row, also when repeated


def mesh_of(shards: int) -> jax.sharding.Mesh:
    devices = [device for device in jax.local_devices() if str(getattr(device, "compute_capability", "")) == "9.0"]
    if len(devices) < shards:
        pytest.skip(f"needs {shards} Hopper GPUs in one host, {len(devices)} are here")
    return make_mesh(shards, devices)


def oracle(x: np.ndarray, delta: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = x + delta
    return total, total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * weight


def exchange_on(mesh: jax.sharding.Mesh, size: int, dtype: str) -> Exchange:
    return allocate_exchange(mesh, size * jnp.dtype(dtype).itemsize, CAPACITY, MAX_SEQS)


def mapped(mesh: jax.sharding.Mesh, function: Any, exchange: Exchange, *arrays: np.ndarray) -> np.ndarray:
    """function(exchange, its part of each array) of every shard, stacked."""
    specs = jax.tree.map(lambda _: P(TP), exchange)

    def on_shard(exchange: Exchange, *parts: jax.Array) -> jax.Array:
        return function(exchange, *(part[0] for part in parts))[None]

    step = jax.jit(spmd(on_shard, mesh, (specs, *(P(TP) for _ in arrays)), P(TP)))
    return np.asarray(step(exchange, *arrays).astype(jnp.float32))


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize("size", [1024, 2560, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shards", SHARDS)
def test_sum_residual_and_norm_cut(shards: int, dtype: str, size: int, two_shots: bool) -> None:
    """Against float64; the same bits on all shards; zeros of either sign, infinities and NaN arrive."""
    mesh, rng = mesh_of(shards), np.random.default_rng(size)
    exchange = exchange_on(mesh, size, dtype)
    kind = jnp.dtype(dtype)
    for tokens in (1, 3, 64, 300):
        parts = rng.standard_normal((shards, tokens, size)).astype(np.float32)
        parts[:, :, 5:40], parts[0, :, 5:20] = -0.0, 0.0
        parts = parts.astype(kind)
        x, weights = (np.broadcast_to(rng.standard_normal(shape).astype(kind), (shards, *shape))
                      for shape in ((tokens, size), (3, size)))  # fmt: skip

        def turns(exchange: Exchange, x: Any, part: Any, weights: Any) -> jax.Array:
            run = partial(all_reduce_add_rms_norm, x, part, weights, 1, exchange.peers, capacity=CAPACITY, eps=EPS,
                          two_shots=two_shots)  # fmt: skip
            return jnp.stack([jnp.stack(run(turn=turn)) for turn in TURNS])

        got = mapped(mesh, turns, exchange, x, parts, weights)
        assert (got == got[:1, :1]).all(), "shards or turns differ"
        delta = parts.astype(np.float64).sum(0)
        wanted = oracle(x[0].astype(np.float64), delta, weights[0, 1].astype(np.float64))
        tolerance = 0.02 if dtype == "bfloat16" else 2e-6
        for ours, theirs in zip(got[0, 0], wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    part = np.zeros((shards, 1, size), kind)
    part[-1, 0, :3] = np.inf, -np.inf, np.nan
    got = mapped(mesh, lambda exchange, x, p, w: turns(exchange, x, p, w)[0, 0], exchange, x[:, :1], part, weights)
    assert np.isposinf(got[:, 0, 0]).all() and np.isneginf(got[:, 0, 1]).all() and np.isnan(got[:, 0, 2]).all()


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize("shards", SHARDS)
def test_a_hundred_thousand_repetitions_cut(shards: int, two_shots: bool) -> None:
    """No hang and no wrong sum: 1,000 captured steps of 100 exchanges, each of other numbers; as many tokens vary."""
    mesh, size = mesh_of(shards), 4096
    exchange = exchange_on(mesh, size, "bfloat16")
    specs = jax.tree.map(lambda _: P(TP), exchange)

    def many(tokens: int, exchange: Exchange, seed: jax.Array) -> jax.Array:
        me, wrong = lax.axis_index(TP), jnp.int32(0)
        weights, x = jnp.ones((1, size), jnp.bfloat16), jnp.zeros((tokens, size), jnp.bfloat16)

        def numbers(shard: int | jax.Array, i: int) -> jax.Array:  # whole ones: their sums are exact in bfloat16
            mixed = jnp.arange(size)[None] + jnp.arange(tokens)[:, None] * 7 + (seed * 100 + i) * 13 + shard * 5
            return (mixed % 31).astype(jnp.bfloat16)

        for i in range(100):
            turn = i % 2 if i < 99 else 2
            total, _ = all_reduce_add_rms_norm(x, numbers(me, i), weights, 0, exchange.peers, turn=turn,
                                               capacity=CAPACITY, eps=EPS, two_shots=two_shots)  # fmt: skip
            wrong += jnp.sum(total != sum(numbers(shard, i) for shard in range(shards)), dtype=jnp.int32)
        return wrong[None]

    steps = [jax.jit(spmd(partial(many, tokens), mesh, (specs, P()), P(TP))) for tokens in (1, 8, 64)]
    counts = [steps[n % 3](exchange, np.int32(n)) for n in range(1000)]
    assert sum(int(np.asarray(count).sum()) for count in counts) == 0


@pytest.mark.parametrize("shards", SHARDS)
def test_one_by_one_outside_of_a_captured_step_cut(shards: int) -> None:
    mesh, size = mesh_of(shards), 1024
    exchange = exchange_on(mesh, size, "float32")
    specs = jax.tree.map(lambda _: P(TP), exchange)

    def one(turn: int, exchange: Exchange, part: jax.Array) -> jax.Array:
        zeros, weights = jnp.zeros_like(part[0]), jnp.ones((1, size), jnp.float32)
        return all_reduce_add_rms_norm(zeros, part[0], weights, 0, exchange.peers, turn=turn, capacity=CAPACITY,
                                       eps=EPS)[0][None]  # fmt: skip

    calls = [jax.jit(spmd(partial(one, turn), mesh, (specs, P(TP)), P(TP))) for turn in (0, 1)]
    for n in range(2000):
        part = np.full((shards, 4, size), n, np.float32) + np.arange(shards, dtype=np.float32)[:, None, None]
        if n % 50 == 0 or n > 1990:
            assert (np.asarray(calls[n % 2](exchange, part)) == part.sum(0)).all()
        else:
            calls[n % 2](exchange, part)


@pytest.mark.parametrize("batch", [1, 64, 130, 300])
@pytest.mark.parametrize("shards", SHARDS)
def test_the_best_candidate_of_all_shards_cut(shards: int, batch: int) -> None:
    mesh, rng = mesh_of(shards), np.random.default_rng(batch)
    exchange = exchange_on(mesh, 1024, "bfloat16")
    values = rng.standard_normal((shards, batch)).astype(np.float32)
    values[:, ::3] = 1.5  # equal ones: the lowest id
    values[:, 1::7] = -np.inf
    ids = (rng.integers(0, 1000, (shards, batch)) + 1000 * np.arange(shards)[:, None]).astype(np.int32)
    got = mapped(mesh, lambda exchange, v, i: exchange.best_of_shards(v, i), exchange, values, ids)
    assert (got == ids[values.argmax(0), np.arange(batch)]).all()


MODEL = ModelConfig(vocab_size=1001, hidden_size=1024, intermediate_size=512, num_hidden_layers=3,
                    num_attention_heads=16, num_key_value_heads=8, head_dim=64, dtype="float32",
                    max_position_embeddings=512)  # fmt: skip


@pytest.mark.parametrize("shards", SHARDS)
def test_an_engine_gives_the_tokens_of_one_gpu_cut(shards: int) -> None:
    """Greedy and seeded rows, chunked prompts, a vocabulary that doesn't divide, processors between plain steps."""
    mesh_of(shards)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, int(n)).tolist() for n in rng.integers(1, 200, 24)]
    params = [SamplingParams(temperature=(i % 3) * 0.5, seed=i, max_tokens=24, ignore_eos=True,
                             top_k=20 if i % 8 == 7 else 0) for i in range(24)]  # fmt: skip
    tokens = {}
    for name, changes in {"one GPU": {}, "exchange": {"tensor_parallel_size": shards},
                          "all-reduce of XLA": {"tensor_parallel_size": shards, "disable_custom_all_reduce": True},
                          }.items():  # fmt: skip
        with Engine(MODEL, max_num_seqs=16, max_num_batched_tokens=128, decode_buckets=(4, 16), token_buckets=(128,),
                    gpu_memory_utilization=0.2, **changes) as llm:  # fmt: skip
            assert (llm._executor.exchange is None) == (name != "exchange")
            for bucket in llm.buckets.all if name == "exchange" else ():
                assert "all-reduce" not in llm._executor.compiled_text(bucket)
            tokens[name] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            assert llm.stats()["compiles_after_warmup"] == 0
    assert tokens["exchange"] == tokens["one GPU"]
    assert tokens["all-reduce of XLA"] == tokens["one GPU"]


@pytest.mark.parametrize("shards", SHARDS)
def test_two_engines_in_two_threads_on_the_same_gpus_cut(shards: int) -> None:
    """Their kernels wait for each other's: in another order on one GPU than on the other, for ever."""
    mesh_of(shards)
    options: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "decode_buckets": (16,),
                               "token_buckets": (128,), "num_blocks": 64, "tensor_parallel_size": shards}  # fmt: skip
    prompts = [[n + 1] * 20 for n in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with Engine(MODEL, **options) as one, Engine(MODEL, **options) as two, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(engine.generate, prompts, params, use_tqdm=False) for engine in (one, two)]
        tokens = [[output.token_ids for output in run.result(timeout=60)] for run in runs]
    assert tokens[0] == tokens[1]
