"""The tiny model's files: its byte-level BPE tokenizer and a Hugging Face folder that any Qwen3 loader reads.

Knows no training; weights come in as float32 host arrays under the parameter table's paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from kjv_corpus import END_OF_TEXT
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxvllm.config import ModelConfig
from jaxvllm.models import qwen3


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (any UTF-8 text can be encoded): id 0 is <|endoftext|>, then the 256 bytes, then the
    merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """config.json as transformers 5 writes it for a dense Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_ids[0],
        "use_cache": True,
        "dtype": config.dtype,
    }


def hugging_face_tensors(config: ModelConfig, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by their Hugging Face names, bfloat16, each contiguous in its own memory."""
    tensors = {}
    for path, info in qwen3.param_table(config).items():
        host = np.asarray(params[path]).astype(ml_dtypes.bfloat16)
        for source in info.sources:
            tensors[source.name] = np.ascontiguousarray(source.take(host))
    return tensors


def write_model(folder: Path, config: ModelConfig, params: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> None:
    """Writes config, generation_config, model.safetensors and the two tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    end = config.eos_token_ids[0]
    write_json(folder / "config.json", hugging_face_config(config))
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.8, "eos_token_id": end, "pad_token_id": end},
    )
    weights = folder / "model.safetensors"
    save_file(hugging_face_tensors(config, params), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


README = """# tiny-kjv

A Qwen3-architecture language model of {parameters:,} parameters (bfloat16), trained for jaxvllm's demo, tests
and examples. It writes English in the manner of the King James Bible and knows nothing else.

- **Data**: the King James Version of the Bible, as Debian's package bible-kjv prints it. The translation is from
  1611 and in the public domain. `python examples/prepare_kjv.py .corpus/kjv.txt` makes the text file, SHA-256
  `{text_sha256}`.
- **Split**: whole chapters by their number n in the file, from 0: n % 30 == 10 is validation (it picked the
  checkpoint), n % 30 == 25 is held out (only reported), the rest is training data, also for the tokenizer.
- **Tokenizer**: byte-level BPE, {vocab_size:,} tokens, trained on the training chapters. A chapter is a heading
  such as "Psalms 23", then one verse a line, then `<|endoftext|>`. No token is added in front of a prompt.
- **Licence**: the text is in the public domain; the weights and the other files of this folder are under the
  MIT licence.
- **Made by**: `{command}`
  on {date}, {device}, jax {jax_version}: {seconds:.0f} s in all.
- **Settings**: {epochs} epochs; AdamW, learning rate {recipe.learning_rate}, weight decay {recipe.weight_decay},
  batches of {recipe.batch} x {recipe.context} tokens; dropout {dropout}, on validation the best of {tried}.

| held-out chapters ({held_out_bytes:,} bytes) | bits per byte |
|---|---|
| this model, weights as stored | **{held_out:.4f}** |
| interpolated modified Kneser-Ney trigram, same tokens and split | {kneser_ney:.4f} |

Validation: {validation:.4f} bits per byte. A token that lies more than {recipe.context} tokens into its chapter
was scored with at least {half_context} tokens before it. The Bible repeats itself in places (the held-out Isaiah
37 is nearly 2 Kings 19, which is training data), and both models had the same chance to learn that. The baseline
is `examples/kneser_ney.py`; every figure of the run is in `metrics.json`.
"""
