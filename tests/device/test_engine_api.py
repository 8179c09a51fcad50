"""What callers do to an engine: good input in every form, bad input, aborts, limits. It goes on serving after each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxvllm
from jaxvllm import LLM, Engine, ModelConfig, SamplingParams
from jaxvllm.config import ConfigError, EngineConfig
from tests.device.support import (
    MODEL,
    VOCAB,
    compilations,
    engine_left_clean,
    make_engine,
    random_prompts,
    sampled,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with engine_left_clean(40, rows=3) as engine:
        yield engine
        assert engine.stats()["compiles_after_warmup"] == 0


def drain(llm: Engine) -> dict[str, jaxvllm.RequestOutput]:
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    return outputs


def test_every_way_to_write_a_prompt(llm: Engine) -> None:
    ids = [5, 6, 7]
    expected = llm.generate([ids], GREEDY, use_tqdm=False)[0].token_ids
    for prompts in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint8), jnp.array(ids), [np.array(ids)],
                    np.array([ids]), jnp.array([ids]), [np.int64(5), 6, np.int32(7)]):  # fmt: skip
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == [expected]
        assert outputs[0].prompt_token_ids == ids and outputs[0].prompt is None
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("text", "no tokenizer"),
        ([[]], r"prompts\[0\] is empty"),
        ([[1], [1, VOCAB]], rf"prompts\[1\]\[1\]={VOCAB} is no token id: ids go from 0 to {VOCAB - 1}"),
        ([[1, -1]], r"prompts\[0\]\[1\]=-1"),
        ([[1.5, 2.0]], r"prompts\[0\] must be a flat list of whole numbers"),
        ([[True, False]], "whole numbers"),
        ([[1, True]], r"prompts\[0\]\[1\] is a bool, no token id"),
        ([[1], ["a", "b"]], r"prompts\[1\] is a list of strings; give one string, or a flat list of token ids"),
        ([[[1], [2, 3]]], r"prompts\[0\]"),
        ([None], r"prompts\[0\] is a NoneType"),
        (3, "prompts is a int"),
        ({"prompt": "x"}, "prompts is a dict"),
        ([[2**70]], r"prompts\[0\]"),
        ([[1] * 200], "max_model_len=128"),
        ([[1] * 128], "max_model_len=128"),
        ([[1, 2], [1] * 128], "max_model_len=128"),  # the first one was queued already
    ],
)
def test_bad_prompts_are_named_and_nothing_stays_behind(llm: Engine, prompts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].token_ids) == 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("x", "sampling_params is a str"),
        ([GREEDY], "1 entries for 2 prompts"),
        ([GREEDY, 3], r"sampling_params\[1\]"),
    ],
)
def test_bad_params(llm: Engine, params: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1], [2]], params, use_tqdm=False)  # type: ignore[arg-type]


def test_lengths_around_the_limit(llm: Engine) -> None:
    outputs = llm.generate([[1] * 127, [1] * 126], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
                           use_tqdm=False)  # fmt: skip
    assert [len(output.token_ids) for output in outputs] == [1, 2]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_a_lone_request_that_outgrows_the_pool_ends_with_length() -> None:
    with make_engine(num_blocks=2, max_num_seqs=2) as small:
        output = small.generate([[1] * 6], SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)[0]
        assert output.outputs[0].finish_reason == "length" and len(output.token_ids) == 3  # 2 blocks of 4, plus one
        with pytest.raises(ValueError, match="9"):
            small.generate([[1] * 20], GREEDY, use_tqdm=False)
        assert len(small.generate([[1, 2]], GREEDY, use_tqdm=False)[0].token_ids) == 5


def test_end_tokens_and_stop_tokens(llm: Engine) -> None:
    free = llm.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    third = free.token_ids[2]
    first_at = free.token_ids.index(third)
    stopped = llm.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True,
                                                       stop_token_ids=[third]), use_tqdm=False)[0]  # fmt: skip
    assert stopped.token_ids == free.token_ids[: first_at + 1]
    assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == third


def test_ten_thousand_requests_queue_and_are_aborted() -> None:
    with make_engine(pool=40, rows=3, warmup=False) as engine:
        ids = [engine.add_request([1, 2, i % VOCAB], GREEDY) for i in range(10_000)]
        assert engine.stats()["num_waiting"] == 10_000
        for request_id in ids[10:]:
            engine.abort_request(request_id)
        outputs = drain(engine)
        assert len(outputs) == 10_000
        assert all(len(outputs[request_id].token_ids) == 5 for request_id in ids[:10])
        assert all(outputs[request_id].outputs[0].finish_reason == "abort" for request_id in ids[10:])


def test_aborts_wherever_a_request_stands(llm: Engine) -> None:
    """Waiting, between two chunks, running, in flight, twice, unknown: the others' tokens don't change."""
    prompts = random_prompts(5, seed=9, low=60, high=100)
    params = sampled(5, max_tokens=10)
    expected = tokens_of(llm, prompts, params)
    for aborted_after in range(12):
        ids = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        outputs = {}
        for _ in range(aborted_after):
            outputs |= {output.request_id: output for output in llm.step()}
        llm.abort_request(ids[1])
        llm.abort_request(ids[1])
        llm.abort_request("nobody")
        llm._scheduler.check_integrity()
        outputs |= drain(llm)
        for i, request_id in enumerate(ids):
            if i != 1:
                assert outputs[request_id].token_ids == expected[i]
        assert outputs[ids[1]].outputs[0].finish_reason == "abort"
        assert outputs[ids[1]].token_ids == expected[1][: len(outputs[ids[1]].token_ids)]
        assert llm.stats()["blocks_free"] == 40


def test_online_requests_survive_a_generate_in_between(llm: Engine) -> None:
    expected = llm.generate([[3, 1, 4]], GREEDY, use_tqdm=False)[0].token_ids
    request_id = llm.add_request([3, 1, 4], GREEDY, request_id="mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.add_request([1], GREEDY, request_id="mine")
    assert len(llm.generate([[1, 5, 9]] * 4, GREEDY, use_tqdm=False)) == 4
    assert drain(llm)[request_id].token_ids == expected
    assert llm.add_request([3], GREEDY, request_id="mine") == "mine"  # free again
    with pytest.raises(ValueError, match="request_id=7 is a int; give a string"):
        llm.add_request([3], GREEDY, request_id=7)  # type: ignore[arg-type]
    drain(llm)


def test_the_last_block_is_computed_again(llm: Engine) -> None:
    """A prompt of exactly two blocks, twice: at least one token is computed, both outputs are equal."""
    llm.reset_prefix_cache()
    first, second = (llm.generate([[11, 12, 13, 14, 15, 16, 17, 18]], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)


def test_score_borrows_and_returns_blocks(llm: Engine) -> None:
    before = llm.stats()["blocks_free"]
    scores = llm.score(list(range(100)))
    assert scores.shape == (99,) and scores.dtype == np.float32 and (scores < 0).all()
    assert llm.stats()["blocks_free"] == before
    with pytest.raises(ValueError, match="max_model_len=128"):
        llm.score([1] * 129)
    with pytest.raises(ValueError, match="2 to max_model_len"):
        llm.score([1])


def test_bad_configurations_name_the_field() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"block_size": 0}, "block_size=0"),
        ({"max_model_len": 10_000}, "max_position_embeddings=512"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"scheduling_policy": "magic"}, "scheduling_policy='magic'"),
        ({"attention_backend": "magic"}, "attention_backend='magic'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": ["float32"]}, r"dtype=\['float32'\]"),
        ({"block_size": np.True_}, "block_size="),
        ({"max_num_seqs": np.int64(0)}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens=2 must be at least max_num_seqs=4"),
        ({"token_buckets": (8,)}, "token_buckets ends at 8"),
    )  # fmt: skip
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            make_engine(**options)
    with pytest.raises(ConfigError, match="not a directory"):
        Engine("/nonexistent/model")
    with pytest.raises(ConfigError, match="model is a NoneType: give a checkpoint's directory"):
        Engine(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model='' is empty"):
        Engine("")
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"):
        Engine("Qwen/Qwen3-0.6B")
    with pytest.raises(TypeError, match="blocksize"):
        make_engine(blocksize=4)


def test_a_recording_that_cannot_be_written_is_told_at_once_and_closing_closes(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere" / "run.json", tmp_path):
        with pytest.raises(ConfigError, match=r"record=.* can't be written: give a file in a folder"):
            make_engine(record=place)
    folder = tmp_path / "gone"
    folder.mkdir()
    engine = make_engine(record=folder / "run.json", warmup=False)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        engine.close()
    assert engine._executor.params == {}
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate([[1]])
    engine.close()


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer=.* has no tokenizer's files"):
        Engine.from_params(ModelConfig.from_dir(MODEL), {}, tmp_path)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    numbers: dict[str, Any] = {"max_num_seqs": np.int64(8), "seed": np.uint8(3), "num_blocks": np.int32(7)}
    config = EngineConfig(**numbers)
    assert config == EngineConfig(max_num_seqs=8, seed=3, num_blocks=7)
    assert all(type(getattr(config, name)) is int for name in ("max_num_seqs", "seed", "num_blocks"))


def test_a_named_backend_that_gives_way_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An engine with "auto" may choose; whoever names triton and gets xla is told, and sees it in the stats."""
    for asked, level in (("auto", logging.INFO), ("triton", logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO), make_engine(attention_backend=asked, warmup=False) as engine:
            stats = engine.stats()
        levels = [record.levelno for record in caplog.records if "xla instead of triton" in record.getMessage()]
        assert levels == [level]
        assert stats.pop("attention_backend") == "xla"
        assert {type(value) for value in stats.values()} <= {int, float}


def test_closed_engines_say_so_and_llm_is_an_alias() -> None:
    assert LLM is Engine
    engine = make_engine(warmup=False)
    assert engine.stats()["compiles"] == 0
    engine.generate([[1]], GREEDY, use_tqdm=False)
    assert engine.stats()["compiles"] == 2 and engine.stats()["compiles_after_warmup"] == 0
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[1]], GREEDY)


def test_every_mix_around_a_bucket_size_compiles_nothing() -> None:
    with compilations() as made:
        jax.jit(lambda x: x + 17)(3)
    assert made  # it would see one
    options: dict[str, Any] = {"max_num_seqs": 5, "decode_buckets": (2, 5), "token_buckets": (16, 64)}
    with make_engine(MODEL, **options) as engine, compilations() as made:
        for count in (1, 2, 3, 4, 5, 6):
            for length in (1, 3, 8, 15, 16, 17):
                prompts = random_prompts(count, seed=count, low=length, high=length + 1)
                tokens_of(engine, prompts, sampled(count, max_tokens=3))
        assert engine.stats()["compiles_after_warmup"] == 0 and engine.stats()["compiles"] == 4
        assert made == []


def test_stop_ids_outside_the_vocabulary_are_refused(llm: Engine) -> None:
    with pytest.raises(ValueError, match=rf"stop_token_ids \[{VOCAB}\] are no token ids"):
        llm.generate([[1]], SamplingParams(stop_token_ids=[3, VOCAB]), use_tqdm=False)


def test_a_whole_pool_can_be_scored() -> None:
    with make_engine(num_blocks=5, max_num_seqs=2, warmup=False) as small:  # 20 slots; the 21st id is only a target
        assert small.score(list(range(21))).shape == (20,)
