"""Checkpoints for the tests, and an independent reading of how parameters are laid out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm.config import ModelConfig
from jaxvllm.models.params import ParamInfo

GOLDEN_DIR = Path(__file__).parents[1] / "golden_data"
GOLDEN = sorted(p.name for p in GOLDEN_DIR.iterdir() if (p / "expected.json").is_file())
BF16 = np.dtype(ml_dtypes.bfloat16)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def keep(info: ParamInfo, array: np.ndarray) -> np.ndarray:
    """The simplest ``put``."""
    assert array.shape == info.shape, info.path
    return array


def hf_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the safetensors library."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def golden_copy(name: str, target: Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """A golden folder to damage; ``config`` changes fields."""
    target.mkdir()
    for file in (GOLDEN_DIR / name).iterdir():
        if file.name != "expected.json":
            shutil.copyfile(file, target / file.name)
    edit_json(target / "config.json", config or {})
    return target


def edit_json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(fields)))


def cast_by_jax(tensors: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Every tensor cast by jax, in one call (another implementation of rounding than numpy's)."""
    flat = np.asarray(jnp.asarray(np.concatenate([t.ravel() for t in tensors.values()])).astype(dtype))
    ends = np.cumsum([t.size for t in tensors.values()])[:-1]
    return {n: p.reshape(t.shape) for (n, t), p in zip(tensors.items(), np.split(flat, ends), strict=True)}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def expected_params(hf: Mapping[str, np.ndarray], config: ModelConfig, tp: int) -> dict[str, np.ndarray]:
    """What each parameter must hold, head by head from the definition of grouped attention.

    Query head q attends with key/value head q // (query heads per key/value head). Shards hold equal runs of
    query heads; the rows of the fused projection are, for each stored key/value head, its query heads, k, v.
    Shares no code with what it checks.
    """
    layers, dim, hidden = config.num_hidden_layers, config.head_dim, config.hidden_size
    q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    stored = max(kv_heads, tp)
    per_stored = q_heads // stored
    rows = -(-config.vocab_size // tp) * tp
    pad = np.zeros((rows - config.vocab_size, hidden), hf[EMBED].dtype)
    result = {"embed": np.concatenate([hf[EMBED], pad]), "final_norm": hf["model.norm.weight"]}
    if not config.tie_word_embeddings:
        result["head"] = np.concatenate([hf[HEAD], pad])

    def weight(layer: int, name: str) -> np.ndarray:
        return hf[f"model.layers.{layer}.{name}.weight"]

    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if config.architecture == "Qwen3ForCausalLM":
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for path, name in norms.items():
        result[path] = np.stack([weight(i, name) for i in range(layers)])
    biases = []
    for i in range(layers):

        def by_stored_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            blocks = []
            for s in range(stored):
                heads = [q[h * dim : (h + 1) * dim] for h in range(s * per_stored, (s + 1) * per_stored)]
                kv = s * per_stored // (q_heads // kv_heads)
                blocks.append(np.stack([*heads, k[kv * dim : (kv + 1) * dim], v[kv * dim : (kv + 1) * dim]]))
            return np.stack(blocks)

        result[f"layers.{i}.qkv"] = by_stored_head(*(weight(i, f"self_attn.{c}_proj") for c in "qkv"))
        if config.architecture == "Qwen2ForCausalLM":
            biases.append(by_stored_head(*(hf[f"model.layers.{i}.self_attn.{c}_proj.bias"] for c in "qkv")))
        result[f"layers.{i}.o"] = weight(i, "self_attn.o_proj")
        result[f"layers.{i}.gate_up"] = np.stack([weight(i, "mlp.gate_proj"), weight(i, "mlp.up_proj")])
        result[f"layers.{i}.down"] = weight(i, "mlp.down_proj")
    if biases:
        result["qkv_bias"] = np.stack(biases)
    return result


def look_without_pauses(patched: pytest.MonkeyPatch) -> None:
    """Removing looks as often whether the folder stays away, but at once: for errors with no write under way."""
    patched.setattr("jaxvllm.convert.workfolder.time", SimpleNamespace(sleep=lambda seconds: None))
