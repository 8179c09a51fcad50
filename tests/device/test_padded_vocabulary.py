"""Case 17: a vocabulary padded for its shards. The padding's logits are the largest, and still nothing counts them.

Tokens that are sampled: test_sampler. Here the numbers of tokens that are given: scores and prompt_logprobs.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxvllm.models.layers import token_logprobs
from jaxvllm.runtime.logprobs import prompt_logprobs
from jaxvllm.runtime.mesh import TP, make_mesh, spmd

P = jax.sharding.PartitionSpec
VOCAB, PADDED, SHARDS, TOP = 93, 96, 2, 4


def test_padded_ids_have_no_share_in_log_probabilities() -> None:
    rng = np.random.default_rng(17)
    table, hidden = rng.normal(size=(PADDED, 8)).astype(np.float32), rng.uniform(0.5, 1, (5, 8)).astype(np.float32)
    table[VOCAB:] = 3  # their logits are above all others
    targets = rng.integers(0, VOCAB, 5).astype(np.int32)
    logits = hidden.astype(np.float64) @ table.T.astype(np.float64)
    assert logits[:, VOCAB:].min() > logits[:, :VOCAB].max()
    exact = logits[:, :VOCAB] - np.log(np.exp(logits[:, :VOCAB]).sum(axis=1, keepdims=True))

    def both(table: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        scores = token_logprobs(table, hidden, targets, vocab_size=VOCAB, axis=TP)
        return scores, prompt_logprobs(table, hidden, targets, TOP, vocab_size=VOCAB, axis=TP)

    mapped = spmd(both, make_mesh(SHARDS), (P(TP, None), P(), P()), (P(), (P(), P())))
    scores, (numbers, ids) = jax.tree.map(np.asarray, jax.jit(mapped)(table, hidden, targets))
    own = exact[np.arange(5), targets]
    np.testing.assert_allclose(scores, own, atol=1e-5)
    np.testing.assert_allclose(numbers[:, 0], own, atol=1e-5)
    best = np.argsort(-exact, axis=1)[:, :TOP]
    assert ids[:, 1:].tolist() == best.tolist()
    assert ids[:, 0].tolist() == (exact >= own[:, None]).sum(axis=1).tolist()  # ranks
    np.testing.assert_allclose(numbers[:, 1:], np.take_along_axis(exact, best, axis=1), atol=1e-5)
