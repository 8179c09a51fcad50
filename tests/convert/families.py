"""Random checkpoints of each family, and an independent forward of all of them: numpy, float64, one sequence.

Written from the papers and from the tensors' names alone; shares no code with jaxvllm.models or jaxvllm.rope.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
COMMON = {"vocab_size": 331, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
          "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32", "eos_token_id": [5, 9]}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
         "sliding_window": None, "max_window_layers": 28}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_tied": QWEN2 | {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True},
    "qwen2_old_config_gqa": QWEN2 | {"rope_theta": 1e6, "num_attention_heads": 6, "hidden_size": 96,
                                     "vocab_size": 257},  # as transformers 4 wrote it
    "llama_default": LLAMA | {"rope_theta": 10000.0, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama3_scaled": LLAMA | {"rope_parameters": LLAMA3},
    "llama3_old_config_head_dim": LLAMA | {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True,
                                           "rope_theta": 10000.0,
                                           "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
              "rope_parameters": DEFAULT_ROPE},
}  # fmt: skip


def make_checkpoint(name: str, folder: Path, seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Writes a Hugging Face folder; returns its config and its tensors."""
    config = COMMON | CONFIGS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, np.random.default_rng(seed))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def head_dim_of(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def random_tensors(config: dict[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def normal(std: float, *shape: int) -> np.ndarray:
        return (random.normal(size=shape) * std).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return 1 + normal(0.1, size)

    made = {"model.embed_tokens.weight": normal(0.5, config["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = normal(0.1, config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows, columns in (("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden),
                                    ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, q),
                                    ("mlp.gate_proj", mlp, hidden), ("mlp.up_proj", mlp, hidden),
                                    ("mlp.down_proj", hidden, mlp)):  # fmt: skip
            made[f"{at}{name}.weight"] = normal(0.2, rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{name}.weight"] = norm(hidden)
        if config["model_type"] == "qwen2":
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                made[f"{at}self_attn.{name}_proj.bias"] = normal(0.5, size)
        if config["model_type"] == "qwen3":
            made[f"{at}self_attn.q_norm.weight"], made[f"{at}self_attn.k_norm.weight"] = norm(dim), norm(dim)
    return made


def inverse_frequencies(config: dict[str, Any]) -> np.ndarray:
    """Llama 3.1's scaling by wavelengths, as its authors' code has it (llama-models, `apply_scaling`)."""
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    rope |= config.get("rope_parameters") or {}
    dim = head_dim_of(config)
    plain = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if rope.get("rope_type", "default") == "default":
        return plain
    scaled = []
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            scaled.append(frequency)
        elif wavelength > length / low:
            scaled.append(frequency / rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return np.array(scaled)


def logits(config: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """[len(ids), V] in float64."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    dim, q_heads, kv_heads = head_dim_of(config), config["num_attention_heads"], config["num_key_value_heads"]
    length = len(ids)
    angles = np.arange(length)[:, None] * inverse_frequencies(config)[None]
    turn = np.exp(1j * angles)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def rotate(x: np.ndarray) -> np.ndarray:  # pairs (i, i + dim/2) as complex numbers
        z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = t["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = norm(x, t[f"{at}input_layernorm.weight"])
        out = np.empty((length, q_heads * dim))
        for head in range(q_heads):
            vectors = {}
            for which, h in (("q", head), ("k", head * kv_heads // q_heads), ("v", head * kv_heads // q_heads)):
                rows = slice(h * dim, (h + 1) * dim)
                vectors[which] = y @ t[f"{at}self_attn.{which}_proj.weight"][rows].T
                bias = t.get(f"{at}self_attn.{which}_proj.bias")
                if bias is not None:
                    vectors[which] = vectors[which] + bias[rows]
                weight = t.get(f"{at}self_attn.{which}_norm.weight")
                if weight is not None:
                    vectors[which] = norm(vectors[which], weight)
            scores = rotate(vectors["q"]) @ rotate(vectors["k"]).T / math.sqrt(dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head * dim : (head + 1) * dim] = weights / weights.sum(-1, keepdims=True) @ vectors["v"]
        x = x + out @ t[f"{at}self_attn.o_proj.weight"].T
        y = norm(x, t[f"{at}post_attention_layernorm.weight"])
        gate = y @ t[f"{at}mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ t[f"{at}mlp.up_proj.weight"].T)) @ t[f"{at}mlp.down_proj.weight"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, t["model.norm.weight"]) @ head.T
