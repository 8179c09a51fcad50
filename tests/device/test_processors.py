"""Processors and filters on the device against the slow reference: masks, penalties, kept sets, draws."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import SamplingParams
from jaxvllm.core.knobs import knobs_of
from jaxvllm.core.request import Request
from jaxvllm.runtime import select
from jaxvllm.runtime.logprobs import gather_logprobs
from jaxvllm.runtime.mesh import TP, make_mesh, spmd
from jaxvllm.runtime.processors import (
    PROCESSOR_SPECS,
    ProcessorState,
    apply_row_state,
    count_tokens,
    host_row,
    process,
    unpack_words,
)
from jaxvllm.runtime.sampler import sample
from tests.device.processor_reference import allowed_and_penalised, filtered, probabilities, random_params

P = jax.sharding.PartitionSpec
ROWS, VOCAB, PADDED = 100, 117, 120
ENDS = (5, 9)


class Batch:
    """Rows of logits with their requests, as the device gets them."""

    def __init__(self, wishes: list[tuple[SamplingParams, list[list[int]]]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.params, self.words = [list(column) for column in zip(*wishes, strict=True)]
        self.prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in wishes]
        self.outputs = [rng.integers(0, VOCAB, rng.integers(0, 20)).tolist() for _ in wishes]
        for output, words in zip(self.outputs, self.words, strict=True):  # some are about to complete a bad word
            if words and rng.random() < 0.7:
                output += words[0][:-1]
        logits = rng.normal(size=(len(wishes), VOCAB)) * rng.choice([0.1, 1, 4], (len(wishes), 1))
        coarse = rng.random((len(wishes), 1)) < 0.3  # with many exact ties
        self.logits = np.where(coarse, np.round(logits), logits).astype(np.float32)
        states, knobs = [], []
        for i, params in enumerate(self.params):
            request = Request.create(str(i), i, self.prompts[i], params, model_eos=ENDS, engine_seed=0)
            knobs.append(knobs_of(request))
            states.append(
                host_row(
                    np.array(self.prompts[i], np.int32), np.array(self.outputs[i], np.int32), vocab_size=VOCAB,
                    padded=PADDED, end_ids=np.array(ENDS), logit_bias=dict(params.logit_bias or {}),
                    allowed=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids),
                    words=[tuple(word) for word in self.words[i]],
                )
            )  # fmt: skip
        self.state = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        self.knobs = np.stack(knobs)
        lengths = zip(self.prompts, self.outputs, strict=True)
        self.positions = np.array([len(prompt) + len(output) for prompt, output in lengths], np.int32)
        self.temperatures = np.array([params.temperature for params in self.params], np.float32)

    def arguments(self) -> tuple[Any, ...]:
        padding = np.full((len(self.logits), PADDED - VOCAB), 1e9, np.float32)  # must never matter
        logits = np.concatenate([self.logits, padding], axis=1)
        return logits, self.knobs, self.state, np.arange(len(logits), dtype=np.int32), self.positions, self.temperatures

    def penalised(self, i: int) -> np.ndarray:
        return allowed_and_penalised(
            self.logits[i], self.params[i], self.prompts[i], self.outputs[i], set(ENDS), self.words[i]
        )


def on_device(axis: str | None = None, unroll: bool = False, backend: str | None = None) -> Any:
    def run(logits: Any, knobs: Any, state: Any, rows: Any, positions: Any, temperatures: Any) -> Any:
        known = unpack_words(knobs)
        raw, changed, lows = process(logits, known, state, rows, positions, temperatures, vocab_size=VOCAB, axis=axis,
                                     unroll=unroll, backend=backend)  # fmt: skip
        return raw, jnp.where(changed >= lows[:, None], changed, -jnp.inf)

    return run


PROCESS = jax.jit(on_device())
DRAW = jax.jit(partial(sample, vocab_size=VOCAB))


@jax.jit
def before_filters(logits: Any, knobs: Any, state: Any, rows: Any, positions: Any, temperatures: Any) -> Any:
    ids = jnp.arange(VOCAB, dtype=jnp.int32)
    narrow = state.replace(counts=state.counts[:, :VOCAB], bias=state.bias[:, :VOCAB])
    return apply_row_state(logits[:, :VOCAB], unpack_words(knobs), narrow, rows, positions, ids)


@cache
def two_thousand() -> list[tuple[Batch, np.ndarray, list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]]:
    """(batch, its logits before the filters, what these should be, and what of them should be kept) of 20 batches."""
    rng, made = np.random.default_rng(0), []
    for number in range(20):
        batch = Batch([random_params(rng, VOCAB) for _ in range(ROWS)], number)
        penalised = np.asarray(before_filters(*batch.arguments()))
        kept = [filtered(row.astype(np.float64), params) for row, params in zip(penalised, batch.params, strict=True)]
        made.append((batch, penalised, [batch.penalised(i) for i in range(ROWS)], kept))
    return made


@pytest.mark.parametrize("backend", [None, "triton_interpret"])
def test_two_thousand_random_params_against_the_definitions(backend: str | None) -> None:
    """Penalised logits to rounding; on these, the same kept sets exactly, and probabilities to 1e-5."""
    compared = unsure_rows = 0
    run = jax.jit(on_device(backend=backend))
    for batch, penalised, wanted_penalised, wanted_kept in two_thousand():
        raw, result = map(np.asarray, run(*batch.arguments()))
        assert (raw[:, :VOCAB] == batch.logits).all() and (result[:, VOCAB:] == -np.inf).all()
        for i, params in enumerate(batch.params):
            np.testing.assert_allclose(penalised[i], wanted_penalised[i], rtol=2e-6, atol=2e-6)
            expected, unsure = wanted_kept[i]
            if not np.isfinite(expected).any():  # nothing was allowed at all
                continue
            kept = result[i, :VOCAB] > -np.inf
            assert ((kept == np.isfinite(expected)) | unsure).all(), params
            assert kept[np.argmax(expected)] and (result[i, :VOCAB][kept] == penalised[i][kept]).all()
            unsure_rows += bool(unsure.any())
            if params.temperature > 1e-4 and not unsure.any():
                compared += 1
                z = np.where(kept, wanted_penalised[i], -np.inf)
                mine = np.where(kept, result[i, :VOCAB].astype(np.float64), -np.inf)
                wanted = probabilities(z, params.temperature)
                np.testing.assert_allclose(probabilities(mine, params.temperature), wanted, atol=1e-5)
    assert compared > 1100 and unsure_rows < 300  # a top_p of 0.9999999 leaves open what float32 can't tell


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_keep_the_same_sets(shards: int) -> None:
    batch = Batch([random_params(np.random.default_rng(7), VOCAB) for _ in range(ROWS)], 3)
    alone = np.asarray(PROCESS(*batch.arguments())[1])
    specs = (P(None, TP), P(), PROCESSOR_SPECS, P(), P(), P())
    mapped = spmd(on_device(TP), make_mesh(shards), specs, (P(None, TP), P(None, TP)))
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(*batch.arguments())[1]), alone)


def test_no_loop_and_no_sort_where_the_passes_are_unrolled() -> None:
    batch = Batch([random_params(np.random.default_rng(7), VOCAB) for _ in range(4)], 3)
    text = jax.jit(on_device(unroll=True)).lower(*batch.arguments()).as_text()
    tokens = np.zeros(4, np.int32)
    text += jax.jit(lambda z, t: gather_logprobs(z, t, 20, axis=None)).lower(batch.logits, tokens).as_text()
    text += jax.jit(partial(count_tokens, axis=None)).lower(batch.state, tokens, tokens).as_text()
    assert not any(
        word in text for word in ("stablehlo.while", "stablehlo.sort", "stablehlo.case", "top_k", "callback")
    )


def one_row(logits: list[float], **params: Any) -> list[int]:
    """Ids that stay."""
    batch = Batch([(SamplingParams(**params), [])], 0)
    padded = np.full((1, PADDED), -50, np.float32)
    padded[0, : len(logits)] = logits
    result = np.asarray(PROCESS(padded, *batch.arguments()[1:])[1])[0]
    return [token for token in range(len(logits)) if result[token] > -np.inf]


@pytest.mark.parametrize(
    ("params", "kept"),
    [  # case 16; logits 3, 2, 2, 1: probabilities 0.53, 0.19, 0.19, 0.07
        ({"top_p": 1e-8}, [0]),
        ({"top_p": 0.9999999}, [0, 1, 2, 3]),
        ({"top_k": 1, "top_p": 0.8}, [0]),
        ({"top_p": 0.52}, [0]),
        ({"top_p": 0.54}, [0, 1, 2]),  # the boundary token stays, and its equal
        ({"top_p": 0.92}, [0, 1, 2]),
        ({"top_p": 0.94}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1, 2]),  # ties with the second
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 1000}, [0, 1, 2, 3]),
        ({"min_p": 0.36}, [0, 1, 2]),
        ({"min_p": 0.37}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 1, "temperature": 1e-4}, [0]),
        ({"top_p": 0.5, "temperature": 100.0}, [0, 1, 2, 3]),
        ({"top_k": 1, "top_p": 1e-8, "temperature": 0}, [0, 1, 2, 3]),  # greedy requests ignore them
    ],
)
def test_the_boundary_and_the_top_token_stay(params: dict[str, Any], kept: list[int]) -> None:
    assert one_row([3.0, 2.0, 2.0, 1.0], **params)[: len(kept) + 1] == kept


def test_equal_infinite_and_nan_logits() -> None:
    assert one_row([1.0] * 5, top_k=1) == [0, 1, 2, 3, 4]
    assert one_row([0.0, -0.0, -1.0], top_k=1) == [0, 1]  # equal as numbers, not as bits
    assert one_row([np.inf, 1.0, -np.inf], top_p=0.5) == [0]
    assert one_row([np.nan, 1.0, 0.5], top_k=1) == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.8},
        {"top_k": 7, "temperature": 0.6},
        {"min_p": 0.05, "temperature": 1.4},
        {"top_k": 30, "top_p": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 1.0}},
    ],
    ids=str,
)
def test_frequencies_of_draws(params: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws against the reference's probabilities; nothing else ever comes."""
    draws = 20_000
    batch = Batch([(SamplingParams(**params, seed=3), [])], 11)
    expected, _ = filtered(batch.penalised(0), batch.params[0])
    _, result = PROCESS(*batch.arguments())
    tokens = DRAW(
        jnp.broadcast_to(result, (draws, PADDED)), jnp.full(draws, batch.temperatures[0]),
        jnp.full((draws, 2), 5, jnp.uint32), jnp.arange(draws, dtype=jnp.int32),
    )  # fmt: skip
    observed = np.bincount(np.asarray(tokens), minlength=VOCAB)
    wanted = draws * probabilities(expected, batch.params[0].temperature)
    assert not observed[wanted == 0].any()
    rare = wanted < 8
    columns = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, wanted)]
    keep = columns[1] > 0
    from scipy import stats  # 2 s

    assert stats.chisquare(columns[0][keep], columns[1][keep]).pvalue > 1e-3


def test_counting_on_the_device_equals_a_fresh_row() -> None:
    """Tokens counted one by one, on 1 and 4 shards, give the row that the host would send after them."""
    batch = Batch([random_params(np.random.default_rng(5), VOCAB) for _ in range(6)], 5)
    rng = np.random.default_rng(6)
    rows = np.array([4, 1, 99, 0], np.int32)
    specs = (PROCESSOR_SPECS, P(), P())
    mapped = jax.jit(spmd(lambda *args: count_tokens(*args, axis=TP), make_mesh(4), specs, PROCESSOR_SPECS))
    count = jax.jit(lambda *args: count_tokens(*args, axis=None))
    alone = sharded = batch.state
    for _ in range(20):
        tokens = rng.integers(0, VOCAB, 4).astype(np.int32)
        alone, sharded = count(alone, rows, tokens), mapped(sharded, rows, tokens)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if row < 6:
                batch.outputs[row].append(token)
    for result in (alone, sharded):
        for i in range(6):
            fresh = host_row(
                np.array(batch.prompts[i]), np.array(batch.outputs[i], np.int32), vocab_size=VOCAB, padded=PADDED,
                end_ids=np.array(ENDS), logit_bias={}, allowed=None, words=[],
            )  # fmt: skip
            np.testing.assert_array_equal(np.asarray(result.counts[i]), fresh.counts)
            np.testing.assert_array_equal(np.asarray(result.recent[i]), fresh.recent)


@pytest.mark.parametrize("shards", [1, 4])
def test_logprobs_and_ranks(shards: int) -> None:
    rng = np.random.default_rng(1)
    logits = np.round(rng.normal(size=(9, 96)) * 3).astype(np.float32)  # ties
    logits[0, 50:] = -np.inf
    logits[:, 93:] = -np.inf
    tokens = rng.integers(0, 50, 9).astype(np.int32)
    mapped = spmd(lambda z, t: gather_logprobs(z, t, 7, axis=TP), make_mesh(shards), (P(None, TP), P()), (P(), P()))
    numbers, ids = map(np.asarray, jax.jit(mapped)(logits, tokens))
    with np.errstate(divide="ignore"):
        exact = np.log(np.stack([probabilities(row.astype(np.float64), 1) for row in logits]))
    for i in range(9):
        order = sorted(range(96), key=lambda token: (-exact[i, token], token))[:7]
        assert ids[i, 1:].tolist() == order
        assert ids[i, 0] == (logits[i] >= logits[i, tokens[i]]).sum()
        np.testing.assert_allclose(numbers[i], exact[i, [tokens[i], *order]], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(("size", "n"), [(1, 3), (7, 20), (700, 20), (12_000, 3)])
def test_top_n_of_any_size(size: int, n: int) -> None:
    values = np.round(np.random.default_rng(size).normal(size=(3, size)) * 2).astype(np.float32)
    found, ids = jax.jit(partial(select.top_n, n=n))(values, jnp.arange(size, dtype=jnp.int32)[None] + 10)
    for i in range(3):
        order = sorted(range(size), key=lambda place: (-values[i, place], place))[:n]
        assert np.asarray(ids)[i].tolist() == [place + 10 for place in order] + [-1] * (n - len(order))
        assert np.asarray(found)[i, : len(order)].tolist() == values[i, order].tolist()


def test_thresholds_find_every_rank() -> None:
    values = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32) * 1e3
    keys = jnp.broadcast_to(select.sort_keys(jnp.asarray(values)), (65, 64))
    ones, needed = jnp.ones((65, 64), jnp.int32), jnp.arange(1, 66, dtype=jnp.int32)
    search = jax.jit(partial(select.threshold, total=lambda x: x), static_argnames="unroll")
    found = np.asarray(search(keys, ones, needed, unroll=False))
    assert (np.asarray(search(keys, ones, needed, unroll=True)) == found).all()
    assert found[:64].tolist() == sorted(np.asarray(keys[0]).tolist(), reverse=True) and found[64] == 0


def test_rows_without_processors_pass_unchanged() -> None:
    batch = Batch([(SamplingParams(temperature=t), []) for t in (0.0, 0.7, 1.0)], 1)
    noisy: ProcessorState = jax.tree.map(lambda leaf: np.full_like(leaf, 77), batch.state)  # another request's
    arguments = batch.arguments()
    _, result = PROCESS(*arguments[:2], noisy, *arguments[3:])
    np.testing.assert_array_equal(np.asarray(result)[:, :VOCAB], batch.logits)
