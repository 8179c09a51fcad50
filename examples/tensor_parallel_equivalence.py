"""Experiment: a model cut into 4 shards computes what the whole one does. Runs on a CPU, on 4 fake devices.

    python examples/tensor_parallel_equivalence.py

Weights keep Hugging Face's layout [out, in], y = x W^T. First by hand, shard after shard in a loop, then the
real forward and sampler through shard_map over a mesh of 4 devices:

    column parallel   W cut along out: shards hold different outputs          y = concat(x W_s^T)
    row parallel      W cut along in, x too: shards hold summands of y        y = sum(x_s W_s^T), all-reduce
    qkv               cut along key/value heads, the query heads go with them; fewer heads than shards: copies
    embedding         cut along the vocabulary: a shard has zeros for others' ids, then a sum
    head              cut along the vocabulary: different logits, no sum, the sampler reduces (max, id)
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

FAKE_DEVICES = "--xla_force_host_platform_device_count"
if FAKE_DEVICES not in os.environ.get("XLA_FLAGS", ""):  # must be set before jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAKE_DEVICES}=4".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from checks import Checks  # noqa: E402
from dense_attention import causal_attend  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from jax.typing import ArrayLike  # noqa: E402

from jaxvllm.config import ModelConfig  # noqa: E402
from jaxvllm.models import params as tables  # noqa: E402
from jaxvllm.models import qwen3  # noqa: E402
from jaxvllm.models.layers import embed_tokens, head_logits, project  # noqa: E402
from jaxvllm.runtime.mesh import TP, make_mesh, spmd  # noqa: E402
from jaxvllm.runtime.sampler import sample  # noqa: E402

SHARDS = 4
TOLERANCE = 1e-5  # of the largest value; float32 sums in another order
CONFIG = ModelConfig(  # 203 ids don't divide by 4: the last shard's table is padded
    vocab_size=203, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16, max_position_embeddings=64, dtype="float32",
)  # fmt: skip

Arrays = dict[str, np.ndarray]


def random_weights(config: ModelConfig) -> Arrays:
    """Canonical (unsharded) parameters, path -> float32."""
    rng = np.random.default_rng(0)
    return {
        path: (rng.normal(0, 0.2, info.shape) + (info.init is None)).astype(np.float32)
        for path, info in qwen3.param_table(config).items()
    }


def stored_for(config: ModelConfig, weights: Arrays, tp: int) -> Arrays:
    """The canonical parameters as a loader lays them out for ``tp`` shards (copied heads, padded
    vocabulary)."""
    canonical = qwen3.param_table(config)
    checkpoint = {
        source.name: source.take(weights[path]) for path, info in canonical.items() for source in info.sources
    }
    return {path: info.assemble(checkpoint) for path, info in qwen3.param_table(config, tp=tp).items()}


def cut(config: ModelConfig, weights: Arrays, path: str) -> list[np.ndarray]:
    """One parameter's shards, along the axis that its table marks "tp"."""
    axis = qwen3.param_table(config, tp=SHARDS)[path].axes.index("tp")
    return np.split(stored_for(config, weights, SHARDS)[path], SHARDS, axis=axis)


def close(checks: Checks, claim: str, got: ArrayLike, want: ArrayLike) -> None:
    """One line: shapes agree and the largest difference is within TOLERANCE of the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        checks.check(claim, False, f"shapes {got.shape} and {want.shape}")
        return
    difference = float(np.abs(got - want).max() / np.abs(want).max())
    checks.check(claim, difference <= TOLERANCE, f"largest difference {difference:.1e} of the largest value")


def mlp_by_hand(checks: Checks, weights: Arrays, x: np.ndarray) -> None:
    """gate_up is column parallel, down row parallel: between them nothing is exchanged."""

    def activate(gate_up: jax.Array) -> jax.Array:  # [T, 2, I] -> [T, I]
        return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]

    @jax.jit
    def whole(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        inner = activate(project(x, gate_up))
        return project(x, gate_up), inner, project(inner, down)

    @jax.jit
    def shard(x: jax.Array, gate_up: jax.Array, inner: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        columns = project(x, gate_up)
        return columns, project(inner, down), project(activate(columns), down)

    columns, inner, want = whole(x, weights["layers.0.gate_up"], weights["layers.0.down"])
    shards = zip(
        cut(CONFIG, weights, "layers.0.gate_up"),
        np.split(np.asarray(inner), SHARDS, axis=-1),  # the row-parallel input, cut like its weight
        cut(CONFIG, weights, "layers.0.down"),
        strict=True,
    )
    parts = [shard(x, *each) for each in shards]
    side_by_side, summands, together = (np.stack(each) for each in zip(*parts, strict=True))
    close(checks, "column parallel: the shards' outputs side by side are the full ones",
          np.concatenate(side_by_side, axis=-1), columns)  # fmt: skip
    close(checks, "row parallel: the sum over shards is the full product", summands.sum(0), want)
    nearest = min(float(np.abs(part - np.asarray(want)).max()) for part in summands)
    checks.check("row parallel: no shard alone is it", nearest > 1e-2, f"the nearest is off by {nearest:.2f}")
    close(checks, "mlp: column, activation on the shard, row, one sum", together.sum(0), want)


def qkv_by_hand(checks: Checks, config: ModelConfig, weights: Arrays, x: np.ndarray) -> None:
    """Grouped queries: a shard has whole key/value heads and exactly the query heads that read them."""

    @jax.jit
    def attention(x: jax.Array, qkv: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v = qwen3.split_qkv(project(x, qkv))
        return q, k, v, causal_attend(config, 0, q, k, v, None)[0]

    q, k, v, out = (np.asarray(each) for each in attention(x, weights["layers.0.qkv"]))
    shards = [attention(x, part) for part in cut(config, weights, "layers.0.qkv")]
    got_q, got_k, got_v, got_out = (np.concatenate(each, axis=1) for each in zip(*shards, strict=True))
    name = f"qkv, {config.num_attention_heads} query and {config.num_key_value_heads} key/value heads"
    copies = max(1, SHARDS // config.num_key_value_heads)
    words = f"each {copies} times" if copies > 1 else "each once"
    close(checks, f"{name}: the shards' query heads in order are all of them", got_q, q)
    close(checks, f"{name}: key heads, {words}", got_k, np.repeat(k, copies, axis=1))
    close(checks, f"{name}: value heads, {words}", got_v, np.repeat(v, copies, axis=1))
    close(checks, f"{name}: a shard attends by itself", got_out, out)


def vocabulary_by_hand(checks: Checks, weights: Arrays, x: np.ndarray, ids: np.ndarray) -> None:
    """Embedding: masked look-up and a sum. Head: logits side by side, the padding cut off."""
    embed, head = jax.jit(partial(embed_tokens, axis=None)), jax.jit(head_logits)
    shards = cut(CONFIG, weights, "embed")
    # Shard i owns the ids from i * size on; seen from there they begin at 0.
    rows = np.stack([embed(shard, ids - i * len(shard)) for i, shard in enumerate(shards)])
    owners = (rows != 0).any(axis=-1).sum(axis=0)
    checks.check("embedding: every id is owned by exactly one shard", bool((owners == 1).all()))
    close(checks, "embedding: the sum over shards is the look-up", rows.sum(0), weights["embed"][ids])
    logits = np.concatenate([head(shard, x) for shard in cut(CONFIG, weights, "head")], axis=-1)
    padding = logits.shape[-1] - CONFIG.vocab_size
    close(checks, f"head: the shards' logits side by side are the full ones and {padding} of padding",
          logits[:, : CONFIG.vocab_size], head(weights["head"], x))  # fmt: skip


def through_shard_map(checks: Checks, config: ModelConfig, ids: np.ndarray) -> None:
    """The engine's forward and sampler, on one device and on four."""
    weights = random_weights(config)
    positions = np.arange(len(ids), dtype=np.int32)
    seeds = np.stack([positions, np.full(len(ids), 7)], axis=1).astype(np.uint32)
    temperatures = np.where(positions % 2 == 0, 0.0, 1.0).astype(np.float32)  # every other one is greedy

    def model(flat: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        params = tables.nest(flat)
        attend = partial(causal_attend, config)
        hidden, _ = qwen3.forward(params, config, jnp.asarray(ids), jnp.asarray(positions), attend, None, axis=TP)
        logits = head_logits(qwen3.head_table(params), hidden)
        tokens = sample(logits, jnp.asarray(temperatures), jnp.asarray(seeds), jnp.asarray(positions),
                        vocab_size=config.vocab_size, axis=TP)  # fmt: skip
        return hidden, logits, tokens

    results = []
    for shards in (1, SHARDS):
        table = qwen3.param_table(config, tp=shards)
        specs = {path: PartitionSpec(*info.axes) for path, info in table.items()}
        out_specs = (PartitionSpec(), PartitionSpec(None, TP), PartitionSpec())
        run = spmd(model, make_mesh(shards), (specs,), out_specs)
        results.append(jax.jit(run)(stored_for(config, weights, shards)))
    (hidden, logits, tokens), (hidden4, logits4, tokens4) = results
    assert isinstance(tokens4, jax.Array)
    head = "tied" if config.tie_word_embeddings else "own"
    name = f"forward, {config.num_key_value_heads} key/value heads, {head} head"
    close(checks, f"{name}: hidden states on 4 devices are those on 1", hidden4, hidden)
    close(checks, f"{name}: logits too", np.asarray(logits4)[:, : config.vocab_size], logits)
    same = np.array_equal(np.asarray(tokens), np.asarray(tokens4))
    checks.check(f"{name}: the same tokens, greedy and sampled, without gathering logits", same,
                 f"{np.asarray(tokens4)[:6]} ...")  # fmt: skip
    copies = [np.asarray(shard.data) for shard in tokens4.addressable_shards]
    checks.check(f"{name}: every device holds the same tokens", all(np.array_equal(copies[0], c) for c in copies))


def main() -> int:
    if jax.local_device_count() < SHARDS:
        print(
            f"{jax.local_device_count()} devices, {SHARDS} needed: run with JAX_PLATFORMS=cpu",
            file=sys.stderr,
        )
        return 1
    checks, weights = Checks(), random_weights(CONFIG)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, CONFIG.hidden_size)).astype(np.float32)
    ids = np.array([CONFIG.vocab_size - 1, *rng.integers(0, CONFIG.vocab_size, 11)], np.int32)
    print(f"By hand: {SHARDS} shards, one after another")
    mlp_by_hand(checks, weights, x)
    few = replace(CONFIG, num_key_value_heads=2, tie_word_embeddings=True)  # each key/value head on two shards
    qkv_by_hand(checks, CONFIG, weights, x)
    qkv_by_hand(checks, few, random_weights(few), x)
    vocabulary_by_hand(checks, weights, x, ids)
    print(f"Through shard_map on {SHARDS} of {jax.local_device_count()} {jax.devices()[0].device_kind} devices")
    through_shard_map(checks, CONFIG, ids)
    through_shard_map(checks, few, ids)
    return checks.exit_code()


if __name__ == "__main__":
    sys.exit(main())
