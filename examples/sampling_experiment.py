"""Experiment: the engine's sampler draws from softmax(logits / temperature). Runs on a CPU.

    python examples/sampling_experiment.py

With E_i ~ Exp(1) and G_i = -log E_i ~ Gumbel(0, 1), these are one and the same draw:

    exponential race    argmin_i E_i / p_i   =   argmax_i p_i / E_i     the shortest waiting time wins
    Gumbel-max          argmax_i (log p_i + G_i)   =   argmax_i (z_i / T + G_i)

The engine takes the last form (times T), which needs no softmax and no division by a number near zero. What
is drawn is compared with softmax by a chi-square test on counts; all seeds are fixed, so the figures are the
same in each run.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from checks import Checks
from scipy.special import gammaincc

from jaxvllm.kernels.noise import gumbel_noise
from jaxvllm.runtime.sampler import sample

NUM_DRAWS = 40_000
LOGITS = np.array([0.0, 1.0, 2.0, 4.0, 2.5, 1.5, 3.0, 0.5], np.float32)
TEMPERATURES = (0.5, 1.0, 2.0)
ALMOST_SURELY_EQUAL, SURELY_DIFFERENT = 1e-3, 1e-12  # p-values


def softmax(temperature: float) -> np.ndarray:
    """float64 [V], the distribution that a sampler should have."""
    scaled = LOGITS.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def p_value(statistic: float, degrees: int) -> float:
    """How probable a chi-square at least this large is, if the two distributions are equal."""
    return float(gammaincc(degrees / 2, statistic / 2))


def counts_of(tokens: jax.Array | np.ndarray) -> np.ndarray:
    return np.bincount(np.asarray(tokens), minlength=len(LOGITS))


def against_distribution(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts [V] under probabilities [V]."""
    expected = counts.sum() * probabilities
    return p_value(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def against_each_other(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that two rows of counts [V], of equal sums, come from one distribution."""
    seen = a + b > 0
    return p_value(float(((a - b)[seen] ** 2 / (a + b)[seen]).sum()), int(seen.sum()) - 1)


@jax.jit
def engine_draws(temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """NUM_DRAWS rows of the same logits through the engine's sampler, each with its own seed or position."""
    logits = jnp.broadcast_to(LOGITS, (NUM_DRAWS, len(LOGITS)))
    temperatures = jnp.full(NUM_DRAWS, temperature, jnp.float32)
    return sample(logits, temperatures, seeds, positions, vocab_size=len(LOGITS))


@jax.jit
def race_draws(temperature: jax.Array, exponential: jax.Array) -> jax.Array:
    """argmax p / E with E [NUM_DRAWS, V] given."""
    return jnp.argmax(jax.nn.softmax(LOGITS / temperature) / exponential, axis=-1)


def main() -> int:
    checks = Checks()
    number = jnp.arange(NUM_DRAWS, dtype=jnp.uint32)
    many_requests = (jnp.stack([number, number * 0 + 1], axis=1), jnp.zeros(NUM_DRAWS, jnp.int32))
    one_request = (jnp.full((NUM_DRAWS, 2), 5, jnp.uint32), number.astype(jnp.int32))
    rng = np.random.default_rng(0)

    print(f"{NUM_DRAWS} draws from {len(LOGITS)} tokens with logits {LOGITS.tolist()}")
    by_temperature = {}
    for temperature in TEMPERATURES:
        target = softmax(temperature)
        tokens = engine_draws(temperature, *many_requests)
        counts = by_temperature[temperature] = counts_of(tokens)
        print(f"T = {temperature}: softmax {np.round(target, 4)}")
        print(f"         drawn   {np.round(counts / NUM_DRAWS, 4)}")
        p = against_distribution(counts, target)
        checks.check(
            f"T = {temperature}: Gumbel-max over seeds follows softmax", p > ALMOST_SURELY_EQUAL, f"p = {p:.3f}"
        )
        p = against_distribution(counts_of(engine_draws(temperature, *one_request)), target)
        checks.check(
            f"T = {temperature}: and over the positions of one request", p > ALMOST_SURELY_EQUAL, f"p = {p:.3f}"
        )
        race = counts_of(race_draws(temperature, rng.exponential(size=(NUM_DRAWS, len(LOGITS)))))
        p = against_distribution(race, target)
        checks.check(f"T = {temperature}: an exponential race follows softmax", p > ALMOST_SURELY_EQUAL, f"p = {p:.3f}")
        p = against_each_other(counts, race)
        checks.check(f"T = {temperature}: race and Gumbel-max agree", p > ALMOST_SURELY_EQUAL, f"p = {p:.3f}")
        noise = gumbel_noise(*many_requests, jnp.arange(len(LOGITS), dtype=jnp.int32))
        same = float(jnp.mean(race_draws(temperature, jnp.exp(-noise)) == tokens))
        checks.check(
            f"T = {temperature}: with the same noise, E = exp(-G), they pick the same tokens",
            same >= 0.9999,
            f"{same:.4%}; rounding may decide a tie",
        )

    p = against_distribution(by_temperature[1.0], softmax(0.5))
    checks.check("the test can tell temperatures apart", p < SURELY_DIFFERENT, f"p = {p:.1e}")
    entropies = [float(-(softmax(t) * np.log(softmax(t))).sum()) for t in TEMPERATURES]
    checks.check(
        "a higher temperature is a flatter distribution",
        entropies == sorted(entropies),
        f"entropies {np.round(entropies, 3)} nats",
    )
    extremes = {t: np.asarray(engine_draws(t, *many_requests)) for t in (0.0, 1e-30, 1e-4, 1e4, 1e30, 3e38)}
    checks.check(
        "any temperature from 0 to the largest float32 gives valid tokens",
        all(((tokens >= 0) & (tokens < len(LOGITS))).all() for tokens in extremes.values()),
    )
    checks.check("T = 0 is greedy", bool((extremes[0.0] == LOGITS.argmax()).all()))
    flat = np.full(len(LOGITS), 1 / len(LOGITS))
    p = against_distribution(counts_of(extremes[1e30]), flat)
    checks.check("T = 1e30 is uniform", p > ALMOST_SURELY_EQUAL, f"p = {p:.3f}")
    once, again = (np.asarray(engine_draws(1.0, *many_requests)) for _ in range(2))
    checks.check("the same seeds give the same tokens", np.array_equal(once, again))
    return checks.exit_code()


if __name__ == "__main__":
    sys.exit(main())
