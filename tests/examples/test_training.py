"""The trainer's mathematics against Hugging Face's numbers, its dropout, and that a few steps learn
something."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_export import hugging_face_tensors, train_tokenizer, write_model
from tiny_training import (
    Recipe,
    drop_features,
    epoch_windows,
    init_params,
    make_total_nats,
    make_train_epoch,
    token_nats,
)
from tokenizers import Tokenizer

from jaxvllm.config import ModelConfig
from jaxvllm.models import qwen3

GOLDEN = Path(__file__).resolve().parents[1] / "golden_data" / "gqa_6_to_2_head_dim_40"
SMALL = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    dtype="bfloat16", eos_token_ids=(0,),
)  # fmt: skip


def test_token_nats_are_hugging_faces_log_probabilities() -> None:
    config = ModelConfig.from_dir(GOLDEN)
    tensors = load_file(GOLDEN / "model.safetensors")
    params = {path: jnp.asarray(info.assemble(tensors)) for path, info in qwen3.param_table(config).items()}
    case = json.loads((GOLDEN / "expected.json").read_text())["cases"][2]
    window = jnp.asarray(case["prompt"] + case["greedy"], jnp.int32)
    nats = jax.jit(lambda params, window: token_nats(config, params, window))(params, window)
    np.testing.assert_allclose(-nats[-len(case["greedy"]) :], case["token_logprobs"], atol=1e-4, rtol=0)


def test_no_dropout_changes_nothing_and_dropout_drops_whole_features() -> None:
    params, key = init_params(SMALL, 0), jax.random.key(0)
    drop = jax.jit(drop_features)
    same = drop(params, jnp.float32(0.0), key)
    assert set(same) == {*params, "head"}
    assert all(np.array_equal(same[path], params.get(path, params["embed"])) for path in same)
    dropped = drop(params, jnp.float32(0.5), key)
    for path, weight in params.items():
        ratio = np.asarray(dropped[path]) / np.asarray(weight)
        if path.endswith((".o", ".down")):
            assert set(np.unique(ratio.round(5))) == {0.0, 2.0}
            assert (ratio.round(5) == ratio[:1].round(5)).all(), f"{path}: not whole columns"
        elif path == "embed":
            silent_words, silent_features = (ratio == 0).all(axis=1), (ratio == 0).all(axis=0)
            assert 0.05 < silent_words.mean() < 0.3 and 0.2 < silent_features.mean() < 0.8
            assert np.array_equal(ratio == 0, silent_words[:, None] | silent_features[None, :])
        else:
            assert np.array_equal(dropped[path], weight), path
    assert not np.array_equal(dropped["embed"] == 0, dropped["head"] == 0)


def test_a_few_steps_lower_the_loss() -> None:
    chapters = [f"Number {i}\n" + "and the word was with the word and the light was good\n" * 8 for i in range(8)]
    tokenizer = train_tokenizer(chapters, SMALL.vocab_size)
    documents = [np.array([0, *encoding.ids, 0], np.int32) for encoding in tokenizer.encode_batch(chapters)]
    recipe = Recipe(context=32, batch=4, learning_rate=1e-2, warmup_steps=4)
    train_epoch, optimizer = make_train_epoch(SMALL, recipe, jnp.dtype(jnp.float32))
    total_nats = make_total_nats(SMALL, recipe.context, recipe.batch, jnp.dtype(jnp.float32))
    params = init_params(SMALL, 0)
    before, state, losses = total_nats(params, documents[:2]), optimizer.init(params), []
    for epoch in range(4):
        windows = epoch_windows(documents, recipe, np.random.default_rng(epoch))
        step, total = jnp.float32(epoch * len(windows)), jnp.float32(4 * len(windows))
        params, state, loss = train_epoch(params, state, step, windows, jax.random.key(0), jnp.float32(0.05), total)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert total_nats(params, documents[:2]) < 0.4 * before


def test_an_exported_model_is_read_back(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["one two three two one\n"] * 3, SMALL.vocab_size)
    params = {path: np.asarray(weight) for path, weight in init_params(SMALL, 0).items()}
    write_model(tmp_path, SMALL, params, tokenizer)
    assert ModelConfig.from_dir(tmp_path) == SMALL
    tensors = load_file(tmp_path / "model.safetensors")
    table = qwen3.param_table(SMALL)
    assert set(tensors) == {source.name for info in table.values() for source in info.sources}
    assert "lm_head.weight" not in tensors
    for path, info in table.items():
        back = np.asarray(info.assemble(tensors), np.float32)
        np.testing.assert_allclose(back, params[path], rtol=2**-8)
    for name, tensor in hugging_face_tensors(SMALL, params).items():
        assert tensor.dtype == tensors[name].dtype == jnp.bfloat16 and np.array_equal(tensor, tensors[name])
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("two").ids == tokenizer.encode("two").ids


def test_transformers_reads_the_exported_config_and_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer(["one two three two one\n"] * 3, SMALL.vocab_size)
    params = {path: np.asarray(weight) for path, weight in init_params(SMALL, 0).items()}
    write_model(tmp_path, SMALL, params, tokenizer)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "Qwen3Config"
    assert config.rope_parameters["rope_theta"] == SMALL.rope.theta and config.head_dim == SMALL.head_dim
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto.eos_token_id == 0 and auto("two one")["input_ids"] == tokenizer.encode("two one").ids
    assert auto.decode(auto("two one")["input_ids"]) == "two one"
