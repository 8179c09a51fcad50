"""Sampling: the generator against published vectors, the noise against its law, draws against softmax."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels.noise import gumbel_from_bits, gumbel_noise, philox4x32
from jaxvllm.runtime import sampler
from jaxvllm.runtime.mesh import TP, make_mesh, spmd

P = jax.sharding.PartitionSpec
sample = jax.jit(sampler.sample, static_argnames=("vocab_size", "axis"))  # one program instead of an operation each


def words(*values: int) -> list[jax.Array]:
    return [jnp.uint32(value) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [  # known-answer vectors of Philox-4x32, 10 rounds (Salmon et al. 2011)
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
@pytest.mark.parametrize("unroll", [False, True])
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], result: str, unroll: bool) -> None:
    out = philox4x32(tuple(words(*key)), tuple(words(*counter)), unroll=unroll)  # type: ignore[arg-type]
    assert " ".join(f"{int(word):08x}" for word in out) == result


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The generator once more, in Python's integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def test_every_id_has_a_word_of_its_own() -> None:
    """The place of an id in the generator's output, by the definition: the promise behind a seed."""
    ids = [0, 1, 511, 512, 1024, 1536, 2047, 2048, 151_935, 2**31 - 1]
    noise = np.asarray(gumbel_noise(jnp.array([[7, 9]], jnp.uint32), jnp.array([3]), jnp.array(ids)))[0]
    for token, got in zip(ids, noise, strict=True):
        group, rest = divmod(token, 2048)
        word = philox((7, 9), (group * 512 + rest % 512, 3, 0, 0))[rest // 512]
        assert got == pytest.approx(-np.log(-np.log1p(-(word + 0.5) / 2**32)), abs=2e-6)
    places = {(i // 2048 * 512 + i % 512, i // 512 % 4) for i in range(10_000)}
    assert len(places) == 10_000


def test_noise_is_finite_for_every_extreme_and_has_a_tail_beyond_17() -> None:
    extremes = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = np.asarray(gumbel_from_bits(jnp.asarray(extremes)))
    assert np.isfinite(noise).all()
    expected = -np.log(-np.log1p(-(extremes.astype(np.float64) + 0.5) / 2**32))
    np.testing.assert_allclose(noise[:-2], expected[:-2], rtol=2e-6, atol=1e-6)
    assert noise[0] > 22 and noise[-1] < -2.7
    assert np.all(np.diff(noise[:4]) < 0)  # small u, large noise: each of the lowest values is told apart


def test_noise_follows_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov over 2^20 draws, and the count beyond 10 (probability 4.5e-5) within 5 sigma."""
    noise = np.asarray(gumbel_noise(jnp.array([[7, 9]], jnp.uint32), jnp.array([3]), jnp.arange(1 << 20)))[0]
    from scipy import stats  # 2 s, not for every process that collects the tests

    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3
    tail = noise.size * stats.gumbel_r.sf(10)
    assert abs((noise > 10).sum() - tail) < 5 * np.sqrt(tail)


def test_no_correlation_between_neighbours() -> None:
    """Positions, ids and seeds that differ by one give independent noise."""
    size = 1 << 12
    seeds = jnp.stack([jnp.arange(64, dtype=jnp.uint32), jnp.zeros(64, jnp.uint32)], axis=1)
    by_seed = np.asarray(gumbel_noise(seeds, jnp.zeros(64, jnp.int32), jnp.arange(size)))
    by_position = np.asarray(gumbel_noise(jnp.zeros((64, 2), jnp.uint32), jnp.arange(64), jnp.arange(size)))
    for noise in (by_seed, by_position):
        n = (noise.shape[0] - 1) * size
        assert abs(np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1]) < 5 / np.sqrt(n)
        assert abs(np.corrcoef(noise[:, 1:].ravel(), noise[:, :-1].ravel())[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_chi_square_against_softmax(temperature: float) -> None:
    draws, vocab = 40_000, 64
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
    tokens = sample(
        jnp.broadcast_to(logits, (draws, vocab)), jnp.full(draws, temperature, jnp.float32),
        jnp.full((draws, 2), 11, jnp.uint32), jnp.arange(draws, dtype=jnp.int32), vocab_size=vocab,
    )  # fmt: skip
    probability = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * probability / probability.sum()
    observed = np.bincount(np.asarray(tokens), minlength=vocab)
    rare = expected < 5
    merged = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    keep = merged[1] > 0
    from scipy import stats

    assert stats.chisquare(merged[0][keep], merged[1][keep]).pvalue > 1e-3


def draw(
    logits: np.ndarray, temperature: float, *, seeds: Sequence[int] = (5,), positions: Sequence[int] = (0,),
    vocab_size: int | None = None,
) -> set[int]:  # fmt: skip
    """The tokens of all pairs of a seed and a position, each a row of one call."""
    pairs = np.array([(seed, position) for seed in seeds for position in positions])
    rows = len(pairs)
    words = np.stack([pairs[:, 0], np.zeros(rows)], axis=1).astype(np.uint32)
    tokens = sample(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits))),
        jnp.full(rows, temperature, jnp.float32), jnp.asarray(words), jnp.asarray(pairs[:, 1], jnp.int32),
        vocab_size=vocab_size or len(logits),
    )  # fmt: skip
    return set(np.asarray(tokens).tolist())


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_noise() -> None:
    logits = np.array([1.0, 3.0, 3.0, -2.0])
    assert draw(logits, 0.0, seeds=range(20)) == {1}


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1.0, 1e4, 1e30, 3e38])
def test_every_temperature_gives_a_token(temperature: float) -> None:
    logits = np.array([-1e30, 40.0, 39.0, -np.inf])
    tokens = draw(logits, temperature, positions=range(40))
    assert tokens <= {0, 1, 2}  # never one without any probability
    if temperature <= 1e-4:
        assert tokens == {1}
    assert draw(np.array([np.nan, 1.0, np.nan]), temperature) == {1}


def test_the_highest_temperature_draws_evenly() -> None:
    """Scaled noise that overflowed would give the lowest id more than its share."""
    from scipy import stats

    draws = 6000
    logits = jnp.broadcast_to(jnp.array([0.0, 5.0, -5.0, -jnp.inf]), (draws, 4))
    keys, positions = jnp.full((draws, 2), 3, jnp.uint32), jnp.arange(draws, dtype=jnp.int32)
    tokens = sample(logits, jnp.full(draws, 3e38, jnp.float32), keys, positions, vocab_size=4)
    counts = np.bincount(np.asarray(tokens), minlength=4)
    assert counts[3] == 0
    assert stats.chisquare(counts[:3]).pvalue > 1e-3


def test_padded_ids_are_never_sampled() -> None:
    logits = np.array([0.0, 0.0, 0.0, 1e9])
    assert all(max(draw(logits, t, positions=range(30), vocab_size=3)) < 3 for t in (0.0, 1.0, 1e30))


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(16, 50)).astype(np.float32)
    temperatures = rng.uniform(0, 2, 16).astype(np.float32)
    seeds = rng.integers(0, 2**32, (16, 2), dtype=np.uint32)
    positions = rng.integers(0, 4096, 16).astype(np.int32)
    batch = np.asarray(sample(*map(jnp.asarray, (logits, temperatures, seeds, positions)), vocab_size=50))
    for i in rng.permutation(16):
        row = slice(i, i + 1)
        alone = sample(*map(jnp.asarray, (logits[row], temperatures[row], seeds[row], positions[row])), vocab_size=50)
        assert int(alone[0]) == batch[i]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_agree_with_one_device(shards: int) -> None:
    """The same tokens over 1 and n shards, ties and a padded vocabulary included."""
    rng = np.random.default_rng(2)
    vocab, padded = 93, 96
    logits = np.round(rng.normal(size=(12, padded)).astype(np.float32) * 2)  # rounded: many exact ties
    logits[:, vocab:] = 100
    temperatures = np.where(np.arange(12) % 3 == 0, 0, 0.9).astype(np.float32)
    seeds = rng.integers(0, 2**32, (12, 2), dtype=np.uint32)
    positions = np.arange(12, dtype=np.int32)
    alone = sample(*map(jnp.asarray, (logits, temperatures, seeds, positions)), vocab_size=vocab)
    mesh = make_mesh(shards)
    sharded = spmd(
        lambda *args: sample(*args, vocab_size=vocab, axis=TP)[None],
        mesh,
        (P(None, TP), P(), P(), P()),
        P(TP),
    )
    each = np.asarray(jax.jit(sharded)(logits, temperatures, seeds, positions))  # one row per shard
    assert each.shape == (shards, 12)
    assert (each == np.asarray(alone)).all()
