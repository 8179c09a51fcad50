"""The tiny model's mathematics: windows of tokens, dropout, loss, one epoch, evaluation.

The forward is the engine's own (jaxvllm.models.qwen3); only `attend` differs: here every sequence of the
batch lies in its own S consecutive tokens and attends to itself, there is no cache. Nothing here reads or
writes files.

Dropout without touching the forward: a mask on a *column* of a weight matrix drops one of its input features.
The mask is drawn once per sequence and step and is the same at all its positions, which is variational
dropout (Gal & Ghahramani 2016, arXiv:1512.05287); a mask on the embedding's *rows* drops whole words
(arXiv:1708.02182, 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense_attention import causal_attend

from jaxvllm.config import ModelConfig
from jaxvllm.models import params as tables
from jaxvllm.models import qwen3
from jaxvllm.models.layers import head_logits

Params = dict[str, jax.Array]  # path -> array, as in the parameter table
HostParams = Mapping[str, np.ndarray]


def init_params(config: ModelConfig, seed: int) -> Params:
    """float32 weights with the table's standard deviations; smaller for what adds to the residual stream."""
    residual = (2 * config.num_hidden_layers) ** -0.5
    rng = np.random.default_rng(seed)
    params: Params = {}
    for path, info in qwen3.param_table(config).items():
        if info.init is None:
            params[path] = jnp.ones(info.shape, jnp.float32)
        else:
            std = info.init * (residual if path.endswith((".o", ".down")) else 1.0)
            params[path] = jnp.asarray(rng.normal(0.0, std, info.shape), jnp.float32)
    return params


def drop_features(params: Params, rate: jax.Array, key: jax.Array) -> Params:
    """One sequence's dropout as masked float32 weights. rate: scalar float32, the share of features dropped.

    Dropped are input features of o (attention), of down (mlp neurons), of the head, the embedding's features,
    and whole words of the embedding at a third of the rate. What is kept is scaled up, so that sums stay
    equal in the mean. A tied head gets its own mask, so the result always has a head.
    """
    dropped = dict(params)
    dropped["head"] = params.get("head", params["embed"])
    paths = [path for path in sorted(dropped) if path.endswith((".o", ".down")) or path in ("embed", "head")]
    sizes = [dropped[path].shape[-1] for path in paths]
    num_words = params["embed"].shape[0]
    uniform = jax.random.uniform(key, (sum(sizes) + num_words,))
    rates = jnp.where(jnp.arange(uniform.size) < sum(sizes), rate, rate / 3)
    masks = jnp.where(uniform >= rates, 1.0 / (1.0 - rates), 0.0)
    *features, words = jnp.split(masks, np.cumsum(sizes))
    for path, mask in zip(paths, features, strict=True):
        dropped[path] = dropped[path] * mask
    dropped["embed"] = dropped["embed"] * words[:, None]
    return dropped


def token_nats(config: ModelConfig, params: Params, window: jax.Array) -> jax.Array:
    """window [S + 1] int32 -> float32 [S]: negative log-likelihood of each token but the first."""
    tree = tables.nest(params)
    positions = jnp.arange(window.shape[0] - 1, dtype=jnp.int32)
    hidden, _ = qwen3.forward(tree, config, window[:-1], positions, partial(causal_attend, config), None)
    logits = head_logits(qwen3.head_table(tree), hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[1:])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of one run; lengths in tokens, batch in sequences."""

    context: int = 1024
    batch: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    warmup_steps: int = 200
    clip_norm: float = 1.0
    beta2: float = 0.98
    seed: int = 0


def epoch_windows(documents: Sequence[np.ndarray], recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """All documents once, in random order and cut at a random phase: int32 [steps, batch, context + 1]."""
    order = rng.permutation(len(documents))
    # A document ends with the token that the next begins with: keep one of the two.
    stream = np.concatenate([documents[i][:-1] for i in order])
    stream = np.roll(stream, int(rng.integers(len(stream))))
    steps = (len(stream) - 1) // (recipe.context * recipe.batch)
    if steps < 1:
        raise ValueError(
            f"the text has {len(stream)} tokens, less than one step of batch={recipe.batch} x "
            f"context={recipe.context}: lower batch"
        )
    starts = rng.permutation((len(stream) - 1) // recipe.context)[: steps * recipe.batch] * recipe.context
    windows = stream[starts[:, None] + np.arange(recipe.context + 1)[None, :]]
    return windows.reshape(steps, recipe.batch, recipe.context + 1)


def make_train_epoch(config: ModelConfig, recipe: Recipe, dtype: jnp.dtype) -> tuple[Callable[..., Any], Any]:
    """(train_epoch, optimizer). float32 master weights; forward and backward in ``dtype``.

    train_epoch(params, opt_state, step, windows [n, batch, context + 1], key, dropout, total_steps) ->
    (params, opt_state, mean loss in nats a token): n optimizer steps in one compiled call. step and
    total_steps place them on the learning rate's schedule (linear warm-up, then a cosine to zero).
    """
    optimizer = optax.chain(optax.clip_by_global_norm(recipe.clip_norm), optax.scale_by_adam(b2=recipe.beta2))
    decayed = {path: info.init is not None for path, info in qwen3.param_table(config).items()}

    def loss(params: Params, windows: jax.Array, key: jax.Array, dropout: jax.Array) -> jax.Array:
        def one_sequence(window: jax.Array, key: jax.Array) -> jax.Array:
            masked = drop_features(params, dropout, key)
            return token_nats(config, {path: weight.astype(dtype) for path, weight in masked.items()}, window)

        return jnp.mean(jax.vmap(one_sequence)(windows, jax.random.split(key, windows.shape[0])))

    def learning_rate(step: jax.Array, total_steps: jax.Array) -> jax.Array:
        warmup = jnp.minimum(recipe.warmup_steps, total_steps / 10)
        progress = jnp.clip((step - warmup) / jnp.maximum(total_steps - warmup, 1), 0.0, 1.0)
        factor = jnp.minimum((step + 1) / jnp.maximum(warmup, 1), 0.5 * (1 + jnp.cos(jnp.pi * progress)))
        return recipe.learning_rate * factor

    def train_epoch(
        params: Params, opt_state: Any, step: jax.Array, windows: jax.Array, key: jax.Array, dropout: jax.Array,
        total_steps: jax.Array,
    ) -> tuple[Params, Any, jax.Array]:  # fmt: skip
        def one(carry: tuple[Params, Any, jax.Array], batch: jax.Array) -> Any:
            params, opt_state, step = carry
            value, grads = jax.value_and_grad(loss)(
                params, batch, jax.random.fold_in(key, step.astype(jnp.uint32)), dropout
            )
            updates: Any
            updates, opt_state = optimizer.update(grads, opt_state)
            rate = learning_rate(step, total_steps)
            params = {
                path: weight - rate * (updates[path] + recipe.weight_decay * decayed[path] * weight)
                for path, weight in params.items()
            }
            return (params, opt_state, step + 1), value

        (params, opt_state, _), losses = jax.lax.scan(one, (params, opt_state, step), windows)
        return params, opt_state, jnp.mean(losses)

    return jax.jit(train_epoch, donate_argnums=(0, 1)), optimizer


def evaluation_windows(documents: Sequence[np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows int32 [N, context + 1] and which predictions count, bool [N, context], so that each token
    counts once.

        document  |d0 d1 ....................................................|
        window 0  |0 ......................... context|                        counts everything
        window 1               |context/2 ......................... 3/2 context|  counts its second half

    So a token that lies past the first window sees at least context/2 tokens before it.
    """
    stride = max(1, context // 2)
    windows, counted = [], []
    for ids in documents:
        start, done = 0, 0  # done: predictions of this document that have been counted
        while done < len(ids) - 1:
            part = ids[start : start + context + 1]
            window = np.zeros(context + 1, np.int32)
            window[: len(part)] = part
            count = np.zeros(context, bool)
            count[done - start : len(part) - 1] = True
            windows.append(window)
            counted.append(count)
            done = start + len(part) - 1
            start += stride
    return np.stack(windows), np.stack(counted)


def make_total_nats(
    config: ModelConfig, context: int, batch: int, dtype: jnp.dtype
) -> Callable[[Params | HostParams, Sequence[np.ndarray]], float]:
    """total_nats(params, documents): summed negative log-likelihood (nats) of every predicted token."""

    @jax.jit
    def batch_nats(params: Params | HostParams, windows: jax.Array, counted: jax.Array) -> jax.Array:
        low = {path: jnp.asarray(weight, dtype) for path, weight in params.items()}
        nats = jax.vmap(lambda window: token_nats(config, low, window))(windows)
        return jnp.sum(jnp.where(counted, nats, 0.0))

    def batches(documents: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        windows, counted = evaluation_windows(documents, context)
        for i in range(0, len(windows), batch):
            missing = max(0, i + batch - len(windows))
            pad = ((0, missing), (0, 0))
            yield np.pad(windows[i : i + batch], pad), np.pad(counted[i : i + batch], pad)

    return lambda params, documents: sum(float(batch_nats(params, w, c)) for w, c in batches(documents))
