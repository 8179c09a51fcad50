"""Every family through both formats and back, against a float64 forward that shares no code with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from jaxvllm.config import SUPPORTED_ARCHITECTURES, ConfigError, ModelConfig
from jaxvllm.convert import convert_checkpoint, export_hf, load_params
from jaxvllm.models.registry import FAMILIES, param_table
from tests.convert import families
from tests.convert.helpers import GOLDEN, GOLDEN_DIR, hf_tensors, keep, same_bits

TOLERANCE = 2e-4  # float32 against float64, of log-probabilities


def test_config_and_registry_know_the_same_architectures() -> None:
    assert tuple(FAMILIES) == SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize("name", families.CONFIGS)
def test_both_formats_and_the_round_trip(tmp_path: Path, name: str) -> None:
    """The same bits at tp 1, 2 and (for heads stored several times) 4; every tensor comes back."""
    _, tensors = families.make_checkpoint(name, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    back = hf_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert [n for n in tensors if not same_bits(back[n], tensors[n])] == []
    config = ModelConfig.from_dir(tmp_path / "hf")
    for tp in (1, 2, 4) if config.num_attention_heads == 4 else (1, 2):
        table = param_table(config, tp=tp)
        loaded = [load_params(tmp_path / f, table, dtype="float32", put=keep) for f in ("hf", "ours", "back")]
        for path, info in table.items():
            assert same_bits(loaded[0][path], loaded[1][path]) and same_bits(loaded[0][path], loaded[2][path])
            for source in info.sources:
                assert same_bits(source.take(loaded[0][path]), tensors[source.name])


def engine(folder: Path, tp: int) -> Engine:
    return Engine(folder, tensor_parallel_size=tp, block_size=16, num_blocks=32, max_num_seqs=2,
                  max_num_batched_tokens=64, decode_buckets=(2,), token_buckets=(64,), max_model_len=256,
                  enable_processors=False)  # fmt: skip


@pytest.mark.parametrize(("name", "tp"), [("qwen2_tied", 4), ("llama3_old_config_head_dim", 2)])
def test_the_engine_computes_the_model(tmp_path: Path, name: str, tp: int) -> None:
    """Scores of 150 tokens (chunked to 64) and greedy tokens, from our format, on several devices."""
    config, tensors = families.make_checkpoint(name, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours")
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 150).tolist()
    exact = families.logits(config, tensors, ids)
    shifted = exact - exact.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    with engine(tmp_path / "ours", tp) as llm:
        scores = llm.score(ids)
        np.testing.assert_allclose(scores, logprobs[np.arange(149), ids[1:]], atol=TOLERANCE, rtol=0)
        output = llm.generate([ids[:40]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    chosen = families.logits(config, tensors, ids[:40] + output[0].token_ids)[39:-1]
    for row, token in zip(chosen, output[0].token_ids, strict=True):
        assert row[token] >= row.max() - 1e-3


@pytest.mark.parametrize("name", [name for name in GOLDEN if "yarn" not in name])
def test_the_oracle_agrees_with_transformers(name: str) -> None:
    """So that the oracle itself is checked."""
    folder = GOLDEN_DIR / name
    config = json.loads((folder / "config.json").read_text())
    case = json.loads((folder / "expected.json").read_text())["cases"][-1]
    last = families.logits(config, hf_tensors(folder), case["prompt"])[-1]
    np.testing.assert_allclose(last[:64], case["first_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["untied_sharded_index", "qwen2_tied_bias", "llama3_scaled_rope"])
def test_transformers_tokens_after_a_round_trip(tmp_path: Path, name: str) -> None:
    """Hugging Face -> ours -> Hugging Face -> ours, and the engine's tokens are those that were recorded."""
    convert_checkpoint(GOLDEN_DIR / name, tmp_path / "1")
    export_hf(tmp_path / "1", tmp_path / "2")
    convert_checkpoint(tmp_path / "2", tmp_path / "3")
    cases = json.loads((GOLDEN_DIR / name / "expected.json").read_text())["cases"]
    greedy = SamplingParams(temperature=0, max_tokens=len(cases[0]["greedy"]), ignore_eos=True)
    with engine(tmp_path / "3", 2) as llm:
        outputs = llm.generate([case["prompt"] for case in cases], greedy, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [case["greedy"] for case in cases]


BASE = families.COMMON | families.LLAMA


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": []} | {"model_type": "gpt2"}, "gpt2"),
        ({"architectures": "LlamaForCausalLM", "model_type": None}, "architectures=['None']"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        (families.QWEN2 | {"use_sliding_window": True}, "use_sliding_window=true"),
        (families.QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"quantization_config": "yes"}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_parameters": families.LLAMA3 | {"surprise": 1}}, "surprise"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": families.LLAMA3 | {"factor": 0}}, "factor=0"),
        ({"rope_parameters": families.LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0 must be above"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"dtype": "float8"}, "float8"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be at most"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"hidden_size": "64"}, "config.json"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_what_isn_t_supported_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(BASE | fields)
    assert named in str(caught.value)
    if "architectures" in fields and "Qwen2ForCausalLM" not in fields["architectures"]:
        assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


def test_qwen2s_bias_is_no_option() -> None:
    assert ModelConfig.from_dict(families.COMMON | families.QWEN2 | {"attention_bias": True}).architecture
