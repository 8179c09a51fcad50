"""Requests with every kind of SamplingParams through the engine, against a whole run in numpy.

The oracle: a float64 forward that shares no code with ours, the processors from their definitions, and the noise of
the request's own seed, position and id. It knows nothing of batches, buckets, chunks, blocks or steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm import Engine, SamplingParams
from jaxvllm.kernels.noise import gumbel_noise
from tests.convert.families import logits
from tests.device.processor_reference import allowed_and_penalised, filtered, probabilities, random_params
from tests.device.support import MODEL, VOCAB, compilations, make_engine, random_prompts

CONFIG = json.loads((MODEL / "config.json").read_text())
TENSORS = load_file(MODEL / "model.safetensors")
ENDS = {int(token) for token in np.atleast_1d(CONFIG["eos_token_id"])}
for value in (json.loads((MODEL / "generation_config.json").read_text()).get("eos_token_id"),):
    ENDS |= {int(token) for token in np.atleast_1d(value)}
CLOSE = 1e-3  # a draw whose two best values are closer than this may fall either way in float32


NOISE = jax.jit(lambda seed, position: gumbel_noise(seed[None], position[None], jnp.arange(VOCAB))[0])


def all_logits(ids: Sequence[int]) -> np.ndarray:
    """float64 [len(ids), V]."""
    return logits(CONFIG, TENSORS, list(ids))


def expect(prompt: Sequence[int], params: SamplingParams, output: Sequence[int], seed: int | None = None) -> None:
    """Each token of ``output`` is what the definitions give after those before it, and it ends where it should."""
    words: list[Any] = [list(word) for word in params.bad_words or ()]
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else ENDS)
    raw = all_logits([*prompt, *output])[len(prompt) - 1 :]
    for i, token in enumerate(output):
        z = allowed_and_penalised(raw[i], params, prompt, output[:i], ENDS | stops, words)
        z, unsure = filtered(z, params)
        if unsure.any():
            continue
        key = np.array([(params.seed if seed is None else seed) or 0, 0], np.uint32)
        noise = np.asarray(NOISE(key, np.int32(len(prompt) + i)), np.float64)
        values = z + params.temperature * noise
        assert values[token] > values.max() - CLOSE, (i, token, int(values.argmax()))
        assert token not in stops or i == len(output) - 1
    assert len(output) == params.max_tokens or output[-1] in stops


LLM: dict[str, Any] = {"enable_processors": True, "num_blocks": 60, "max_logprobs": 5, "many_steps": True}


@pytest.fixture(scope="module")
def llm():
    with make_engine(**LLM) as engine:
        assert engine.stats()["compiles"] == 3  # two buckets of as many sequences
        yield engine
        engine._scheduler.check_integrity()
        assert engine.stats()["blocks_free"] == 60
        assert engine.stats()["compiles_after_warmup"] == 0


@pytest.fixture(scope="module")
def sharded():
    """Two shards, no running ahead, log-probabilities of what was drawn from."""
    with make_engine(enable_processors=True, max_logprobs=5, logprobs_mode="processed_logprobs", warmup=False,
                     tensor_parallel_size=2, async_steps=0) as engine:  # fmt: skip
        yield engine


def wishes(count: int, seed: int, **fixed: Any) -> list[SamplingParams]:
    """Random params with seeds of their own, among them some that need no processors."""
    rng = np.random.default_rng(seed)
    made = [random_params(rng, VOCAB)[0] for _ in range(count)]
    made = [SamplingParams(temperature=0.8) if i % 4 == 3 else params for i, params in enumerate(made)]
    return [replace(one, max_tokens=12, min_tokens=min(one.min_tokens, 8), seed=100 + i, **fixed)
            for i, one in enumerate(made)]  # fmt: skip


def run(llm: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_every_request_gets_what_the_definitions_say(llm: Engine) -> None:
    prompts, params = random_prompts(16, seed=2, high=30), wishes(16, 3)
    for prompt, one, tokens in zip(prompts, params, run(llm, prompts, params), strict=True):
        expect(prompt, one, tokens)


def test_no_batch_row_chunk_preemption_or_shard_changes_a_request(llm: Engine, sharded: Engine,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Case 14: alone, in a batch, backwards, in chunks of a few tokens, preempted, over two shards, without running
    ahead: the same tokens."""
    prompts, params = random_prompts(8, seed=5, low=4, high=24), wishes(8, 8)
    together = run(llm, prompts, params)
    assert [run(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)] == together
    assert run(llm, prompts[::-1], params[::-1])[::-1] == together
    assert run(sharded, prompts, params) == together
    with make_engine(**LLM, pool=14, scheduling_policy="running_first") as crowded:
        monkeypatch.setattr(crowded._scheduler, "max_num_batched_tokens", 8)
        assert run(crowded, prompts, params) == together
        stats = crowded.stats()
        assert stats["preemptions"] > 0
        assert stats["prefill_tokens"] <= 8 * (stats["prefill_steps"] + stats["mixed_steps"])


def test_samples_share_the_prompt_and_have_seeds_of_their_own(llm: Engine) -> None:
    prompt = random_prompts(1, seed=9, low=22, high=23)[0]
    params = SamplingParams(n=3, seed=40, max_tokens=6, ignore_eos=True, top_k=50, repetition_penalty=1.2)
    llm.reset_prefix_cache()
    before = llm.stats()["prefill_tokens"]
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    assert llm.stats()["prefill_tokens"] - before == 22 + 2 * (22 - 20)  # five blocks of four are computed once
    assert [one.index for one in output.outputs] == [0, 1, 2] and output.finished
    for one in output.outputs:
        expect(prompt, params, one.token_ids, seed=40 + one.index)
    unseeded = llm.generate([prompt], SamplingParams(n=3, max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
    assert len({tuple(one.token_ids) for one in unseeded.outputs}) == 3


def test_metrics_of_several_samples_are_the_requests(llm: Engine) -> None:
    """The end is the last sample's, in whichever order they end; tokens are counted together."""
    prompt = random_prompts(1, seed=9, low=22, high=23)[0]
    orders = set()
    for seed in range(8):
        params = SamplingParams(n=2, seed=seed, max_tokens=30, stop_token_ids=list(range(0, VOCAB, 8)))
        started = time.perf_counter()
        name = llm.add_request(prompt, params)
        ends: dict[int, float] = {}
        output = None
        while llm.has_unfinished_requests():
            for output in llm.step():
                for one in output.outputs:
                    if one.finished():
                        ends.setdefault(one.index, time.perf_counter())
        assert output is not None and output.request_id == name and output.metrics is not None
        lengths = [len(one.token_ids) for one in output.outputs]
        orders.add(lengths[0] < lengths[1])
        assert output.metrics.num_output_tokens == sum(lengths)
        assert output.metrics.finished_time is not None and started < output.metrics.finished_time <= max(ends.values())
        if lengths[0] != lengths[1]:
            assert output.metrics.finished_time > min(ends.values())
    assert orders == {True, False}


def test_a_request_of_several_samples_is_one_request(llm: Engine) -> None:
    name = llm.add_request([1, 2, 3, 4, 5], SamplingParams(n=3, max_tokens=50, ignore_eos=True), request_id="many")
    with pytest.raises(ValueError, match="'many' is in use"):
        llm.add_request([1], request_id="many")
    llm.step()
    llm.step()
    llm.abort_request(name)
    outputs = llm.step()
    assert [output.request_id for output in outputs] == ["many"] and outputs[0].finished
    assert [one.finish_reason for one in outputs[0].outputs] == ["abort"] * 3
    assert not llm.has_unfinished_requests() and llm.stats()["blocks_free"] == 60


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_the_chosen_distribution(llm: Engine, sharded: Engine, mode: str) -> None:
    params = SamplingParams(temperature=0.7, top_k=40, presence_penalty=1.0, logit_bias={7: 2.0}, max_tokens=8,
                            ignore_eos=True, logprobs=3, seed=4)  # fmt: skip
    prompt = random_prompts(1, seed=4, low=9, high=10)[0]
    engine = llm if mode == "raw_logprobs" else sharded
    result = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    expect(prompt, params, result.token_ids)
    assert result.logprobs is not None and len(result.logprobs) == 8
    total, raw = 0.0, all_logits([*prompt, *result.token_ids])[len(prompt) - 1 :]
    for i, (token, found) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        z = raw[i]
        if mode == "processed_logprobs":
            z, _ = filtered(allowed_and_penalised(z, params, prompt, result.token_ids[:i], set(), []), params)
        with np.errstate(divide="ignore"):
            exact = np.log(probabilities(z, params.temperature if mode == "processed_logprobs" else 1.0))
        top = np.argsort(-exact, kind="stable")[:3].tolist()
        assert list(found) == [token, *(one for one in top if one != token)]
        for one, entry in found.items():
            assert entry.logprob == pytest.approx(exact[one], abs=2e-4) and entry.decoded_token is None
            assert entry.rank == (exact >= exact[one]).sum()
        total += exact[token]
    assert result.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_prompt_logprobs_in_chunks_and_over_cached_blocks(llm: Engine) -> None:
    """Prompts longer than a chunk, twice: the second time their blocks are found in the cache."""
    prompt = random_prompts(1, seed=12, low=90, high=91)[0]
    exact = all_logits(prompt)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    for _ in range(2):
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        found = output.prompt_logprobs
        assert found is not None and len(found) == 90 and found[0] is None
        for i, entries in enumerate(found[1:]):
            assert entries is not None
            exact_i = np.log(probabilities(exact[i], 1.0))
            assert next(iter(entries)) == prompt[i + 1]
            assert set(np.argsort(-exact_i, kind="stable")[:2].tolist()) <= set(entries)
            assert all(entry.logprob == pytest.approx(exact_i[one], abs=2e-4) for one, entry in entries.items())
    assert (output.num_cached_tokens or 0) > 0
    scores = llm.score(prompt)
    mine = [next(iter(entries.values())).logprob for entries in found[1:] if entries is not None]
    np.testing.assert_allclose(mine, scores, atol=1e-5)


def test_scores_equal_the_logprobs_of_sampling(llm: Engine) -> None:
    prompt = random_prompts(1, seed=14, low=20, high=21)[0]
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0, seed=1)
    result = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert result.logprobs is not None
    mine = [entry[token].logprob for token, entry in zip(result.token_ids, result.logprobs, strict=True)]
    np.testing.assert_allclose(mine, llm.score(prompt + result.token_ids)[-20:], atol=2e-5)


def test_every_mix_of_processors_compiles_nothing(llm: Engine) -> None:
    """Case 13: greedy, sampled, top-p, logprobs and penalties around the sizes of both kinds of bucket."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"top_p": 0.9}, {"logprobs": 2}, {"frequency_penalty": 0.5, "min_tokens": 1},
    ]  # fmt: skip
    with compilations() as made:
        for count in (1, 3, 4, 5):
            for length in (63, 64, 65):
                prompts = random_prompts(count, seed=count, low=length, high=length + 1)
                params = [SamplingParams(max_tokens=3, **kinds[(count + length + i) % 5]) for i in range(count)]
                llm.generate(prompts, params, use_tqdm=False)
    assert made == [] and llm.stats()["compiles_after_warmup"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1}}, rf"logit_bias \[{VOCAB}\] are no token ids"),
        ({"allowed_token_ids": [VOCAB]}, r"allowed_token_ids"),
        ({"bad_words": [[VOCAB]]}, "bad_words"),
        ({"bad_words": [[1] * 17]}, "1 to 16 tokens"),
        ({"bad_words": [[1]] * 129}, "at most 128"),
        ({"bad_words": ["text"]}, "no tokenizer"),
        ({"logprobs": 6}, "logprobs=6 is above the engine's max_logprobs=5"),
        ({"prompt_logprobs": 6}, "prompt_logprobs=6"),
    ],
)
def test_what_this_engine_cannot_serve_is_named(llm: Engine, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1]], SamplingParams(**params), use_tqdm=False)


def test_engines_without_processors_refuse_them() -> None:
    with make_engine(warmup=False) as engine:
        with pytest.raises(ValueError, match="enable_processors=False"):
            engine.generate([[1]], SamplingParams(top_p=0.5), use_tqdm=False)
        assert engine.add_request([1], SamplingParams(top_p=0.5, temperature=0))  # greedy: nothing to do
