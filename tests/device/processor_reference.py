"""The processors from their definitions (SamplingParams' docstring): numpy, float64, one row, slow, no jax.

Also random SamplingParams to compare with, and what a whole request must give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxvllm import SamplingParams

EDGE = 2e-6  # a token this close (relatively) to a limit may fall to either side of it in float32


def allowed_and_penalised(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int],
                          ends: set[int], words: Sequence[Sequence[int]]) -> np.ndarray:  # fmt: skip
    """float64[V]: what temperature and filters see."""
    z = logits.astype(np.float64).copy()
    for token in range(len(z)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            z[token] = -np.inf
        for *before, last in words:
            if token == last and list(output)[len(output) - len(before) :] == before and len(output) >= len(before):
                z[token] = -np.inf
        if token in ends and len(output) < params.min_tokens:
            z[token] = -np.inf
        z[token] += (params.logit_bias or {}).get(token, 0.0)
        times = list(output).count(token)
        if times or token in prompt:
            z[token] *= 1 / params.repetition_penalty if z[token] > 0 else params.repetition_penalty
        z[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return z


def filtered(z: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """(z with -inf for what min_p, top_k and top_p leave out, bool[V]: too close to a limit to tell)."""
    unsure = np.zeros(len(z), bool)
    if params.temperature == 0:
        return z, unsure
    kept = np.isfinite(z)
    if not kept.any():
        return z, unsure
    relative = np.exp((z - z[kept].max()) / params.temperature)  # probability over that of the top token
    if params.min_p:
        unsure |= kept & (abs(relative / params.min_p - 1) < EDGE * 50)
        kept &= relative >= params.min_p
    if params.top_k and params.top_k < kept.sum():
        kept &= z >= np.sort(z[kept])[-params.top_k]
    if params.top_p < 1:
        mass, before = relative[kept].sum(), 0.0
        nucleus = np.zeros(len(z), bool)
        for value in np.unique(z[kept])[::-1]:  # equals stay or go together
            equal = kept & (z == value)
            if abs(before - params.top_p * mass) < EDGE * mass:
                unsure |= equal
            if before < params.top_p * mass:
                nucleus |= equal
            before += relative[equal].sum()
        kept = nucleus
    return np.where(kept, z, -np.inf), unsure


def probabilities(z: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(z / temperature) in float64; at 0 that of z itself, as log-probabilities of greedy requests are."""
    scaled = (z - z.max()) / (temperature or 1.0)
    weights = np.exp(scaled)
    return weights / weights.sum()


def random_params(rng: np.random.Generator, vocab: int) -> tuple[SamplingParams, list[list[int]]]:
    """SamplingParams with about half of the fields off their defaults, and bad words as ids."""

    def maybe(chance: float) -> bool:
        return bool(rng.random() < chance)

    def ids(most: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(1, most + 1)).tolist()

    chosen: dict[str, Any] = {"temperature": float(rng.choice([0, 1e-4, 0.3, 0.7, 1, 1.5, 5]))}
    if maybe(0.5):
        chosen["top_k"] = int(rng.choice([1, 2, 3, 10, vocab - 1, vocab, vocab + 5, int(rng.integers(1, vocab))]))
    if maybe(0.5):
        chosen["top_p"] = float(rng.choice([1e-8, 0.1, 0.5, 0.9, 0.99, 0.9999999, float(rng.uniform(0.01, 1))]))
    if maybe(0.3):
        chosen["min_p"] = float(rng.choice([1e-6, 0.01, 0.1, 0.5, 1]))
    for name in ("presence_penalty", "frequency_penalty"):
        if maybe(0.4):
            chosen[name] = round(float(rng.uniform(-2, 2)), 2)
    if maybe(0.4):
        chosen["repetition_penalty"] = round(float(rng.uniform(0.5, 2)), 2)
    if maybe(0.3):
        chosen["logit_bias"] = {token: float(rng.choice([-100, -1.5, 0.25, 3, 100])) for token in ids(5)}
    if maybe(0.2):
        chosen["allowed_token_ids"] = ids(vocab // 2)
    if maybe(0.3):
        chosen["min_tokens"] = int(rng.integers(0, 12))
    words = [ids(3) for _ in range(rng.integers(1, 6))] if maybe(0.3) else []
    return SamplingParams(**chosen, bad_words=words, max_tokens=64), words
