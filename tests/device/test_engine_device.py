"""The device room through the engine: shards, running ahead, padding, unwritten slots, the compiled text."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from jaxvllm import ModelConfig, SamplingParams
from jaxvllm.config import ConfigError
from tests.device.support import (
    DATA,
    MODEL,
    ONE_LAYER,
    fill,
    kv_of,
    make_engine,
    poison,
    random_prompts,
    sampled,
    tokens_of,
    two_layers,
)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tied_head_dim_differs", 2),  # 4 query heads, 2 kv heads
        ("mqa_one_kv_head_odd_vocab", 4),  # kv head replicated, vocabulary of 257 padded
        ("untied_sharded_index", 4),  # two kv heads over four shards
    ],
)
def test_shards_give_the_tokens_of_one_device(name: str, size: int) -> None:
    prompts, params = random_prompts(6, high=30), sampled(6)
    prompts = [[token % 257 for token in prompt] for prompt in prompts]
    with make_engine(two_layers(name)) as llm:
        alone, scores = tokens_of(llm, prompts, params), llm.score(prompts[0] * 3)
    with make_engine(two_layers(name), tensor_parallel_size=size) as llm:
        assert tokens_of(llm, prompts, params) == alone
        np.testing.assert_allclose(llm.score(prompts[0] * 3), scores, atol=1e-5)
        state = llm._executor.state
        each = [np.asarray(shard.data) for shard in state.last_tokens.addressable_shards]
        assert len(each) == size and all((one == each[0]).all() for one in each)  # really replicated
        assert state.cache.kv.addressable_shards[0].data.shape[3] == max(1, state.cache.kv.shape[3] // size)


EIGHT_HEADS = replace(ModelConfig(**ONE_LAYER), num_attention_heads=8, num_key_value_heads=8, head_dim=8)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8])
def test_eight_heads_on_up_to_eight_devices(size: int) -> None:
    prompts, params = random_prompts(3, high=30), sampled(3, max_tokens=6)
    tokens = []
    for shards in (1, size):
        with make_engine(EIGHT_HEADS, tensor_parallel_size=shards) as llm:
            tokens.append(tokens_of(llm, prompts, params))
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(folder.name for folder in DATA.iterdir() if folder.is_dir()))
def test_every_recorded_model_on_every_mesh(name: str) -> None:
    """The tokens of one device, greedy and seeded, wherever heads divide; else an error with the numbers."""
    config = ModelConfig.from_dir(DATA / name)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    prompts, params = random_prompts(6, high=30), sampled(6)
    prompts = [[token % config.vocab_size for token in prompt] for prompt in prompts]
    with make_engine(DATA / name) as llm:
        alone = tokens_of(llm, prompts, params)
    served = []
    for size in (2, 3, 4, 8):
        if (kv_heads % size and (size % kv_heads or heads % size)) or config.intermediate_size % size:
            with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} must divide"):
                make_engine(DATA / name, tensor_parallel_size=size)
            continue
        served.append(size)
        with make_engine(DATA / name, tensor_parallel_size=size) as llm:
            assert tokens_of(llm, prompts, params) == alone
    assert served == ([2, 4] if heads == 4 else [2] if heads == 6 else [])


def test_shards_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3.*num_key_value_heads=8"):
        make_engine(EIGHT_HEADS, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3.*num_key_value_heads=2"):
        make_engine(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=16 needs that many devices, but 8"):
        make_engine(tensor_parallel_size=16)


@pytest.mark.parametrize("num_blocks", [96, 14])
def test_running_ahead_changes_no_token(num_blocks: int) -> None:
    """async_steps 0, 1 and 2 give the same tokens, with early ends, more requests than rows and preemptions."""
    prompts = random_prompts(10, seed=3, low=2, high=30)
    params = sampled(10, max_tokens=20)
    results, preemptions = [], []
    for steps in (0, 1, 2):
        with make_engine(pool=num_blocks, async_steps=steps, many_steps=True) as llm:
            free_ends = [SamplingParams(temperature=p.temperature, max_tokens=20, seed=p.seed) for p in params]
            results.append([tokens_of(llm, prompts, params), tokens_of(llm, prompts, free_ends)])
            stats = llm.stats()
            preemptions.append(stats["preemptions"])
            assert stats["blocks_free"] == num_blocks and stats["num_running"] == stats["num_waiting"] == 0
            llm._scheduler.check_integrity()
    assert results[0] == results[1] == results[2]
    assert (min(preemptions) > 0) == (num_blocks == 14)


def test_a_seed_gives_its_tokens_alone_in_a_batch_in_another_row_and_after_a_preemption() -> None:
    prompts = random_prompts(7, seed=5, low=4, high=24)
    params = sampled(7, max_tokens=16)
    with make_engine(many_steps=True) as llm:
        together = tokens_of(llm, prompts, params)
        alone = [tokens_of(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
        backwards = tokens_of(llm, prompts[::-1], params[::-1])[::-1]
    with make_engine(pool=14, many_steps=True) as llm:
        crowded = tokens_of(llm, prompts, params)
        assert llm.stats()["preemptions"] > 0
    assert together == alone == backwards == crowded
    with make_engine(many_steps=True) as llm:  # unseeded requests: the engine's seed and their number
        unseeded = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
        first = tokens_of(llm, [prompts[0]] * 2, [unseeded] * 2)
    with make_engine(many_steps=True) as llm:
        again = tokens_of(llm, [prompts[0]] * 2, [unseeded] * 2)
    assert first == again and first[0] != first[1]


def test_unwritten_slots_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison: in a cache of NaN, chunked prompts with cached prefixes give the tokens of one-shot prompts."""
    prompts = random_prompts(4, seed=6, low=20, high=60)
    prompts += [prompts[0] + [7, 8, 9], prompts[0][:16] + prompts[1]]
    params = sampled(6)
    with make_engine(enable_prefix_caching=False, many_steps=True) as llm:
        plain = tokens_of(llm, prompts, params)
    for chunk, bucket in ((4, 64), (7, 7), (64, 64)):
        with make_engine(max_num_batched_tokens=bucket, many_steps=True) as llm:
            monkeypatch.setattr(llm._scheduler, "max_num_batched_tokens", chunk)
            poison(llm)
            assert tokens_of(llm, prompts, params) == plain
            scored = llm.score(prompts[0])
            assert np.isfinite(scored).all()
            if chunk == 64:
                assert llm.stats()["prefix_hit_tokens"] > 0


def test_padding_changes_no_live_block() -> None:
    """Case 12: empty plans change nothing in the cache nor any row's token, and steps of one request in wide buckets
    nothing but the blocks that it holds."""
    with make_engine(many_steps=True) as llm:
        before, tokens = np.random.default_rng(8).normal(size=kv_of(llm).shape).astype(np.float32), np.arange(9, 13)
        fill(llm, before, tokens)
        for bucket in llm.buckets.all:
            llm._executor.dispatch(bucket, llm._executor.layout(bucket).empty())
        assert (kv_of(llm) == before).all()
        assert (np.asarray(llm._executor.state.last_tokens) == tokens).all()
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        held: set[int] = set()
        while llm.has_unfinished_requests():
            llm.step()
            for request in llm._scheduler.requests.values():
                held |= set(request.block_table)
        changed = np.flatnonzero((kv_of(llm) != before).any(axis=(0, 1, 3, 4, 5)))
        assert set(changed.tolist()) == held and len(held) == 2  # five computed tokens, blocks of four
        assert (np.asarray(llm._executor.state.last_tokens)[1:] == tokens[1:]).all()  # the request had row 0


def test_no_copy_of_the_cache_in_the_compiled_text() -> None:
    """The cache is donated and written in place: no instruction but parameters, aliases and updates has its shape."""
    with make_engine(many_steps=True) as llm:
        shape = ",".join(map(str, llm._executor.state.cache.kv.shape))
        for bucket in llm.buckets.all:
            text = llm._executor.compiled_text(bucket)
            assert "input_output_alias" in text
            copies = [line for line in text.splitlines() if re.search(rf"= f32\[{shape}\]\S* copy(-start)?\(", line)]
            assert not copies, copies


def test_equal_outputs_from_both_formats(tmp_path_factory: pytest.TempPathFactory) -> None:
    from jaxvllm.convert import convert_checkpoint as convert

    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(MODEL, folder)
    prompts, params = random_prompts(4), sampled(4)
    with make_engine(many_steps=True) as llm:
        from_hf = tokens_of(llm, prompts, params), llm.score(prompts[0])
    with make_engine(folder, many_steps=True) as llm:
        assert tokens_of(llm, prompts, params) == from_hf[0]
        assert (llm.score(prompts[0]) == from_hf[1]).all()
