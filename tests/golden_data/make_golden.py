"""Makes the golden checkpoints of the Qwen2 and Llama families with transformers and torch; needs no GPU, no network.

    python tests/golden_data/make_golden.py [NAME ...]

writes tests/golden_data/NAME/ (config.json, generation_config.json, model.safetensors, expected.json) for every shape
below, or the named ones. Random float32 weights: biases and norms too, which transformers starts at 0 and 1; query and
key projections larger, so that attention is far from uniform. Greedy tokens come from whole forwards, one a token; a
seed is refused where two best logits are closer than MARGIN anywhere, so that tokens don't hang on rounding.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS, NEW_TOKENS, MARGIN = (1, 7, 33, 150), 24, 1e-3
DEFAULT = {"rope_theta": 10000.0, "rope_type": "default"}
# original length 64, heads of 32: two frequencies stay, three are mixed, eleven are divided
LLAMA3 = {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied_bias": ("Qwen2", dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
                                      tie_word_embeddings=True, rope_parameters=DEFAULT | {"rope_theta": 1e6})),
    "qwen2_5_untied_gqa_6_to_2": ("Qwen2", dict(hidden_size=192, num_attention_heads=6, num_key_value_heads=2,
                                                vocab_size=257, rope_parameters=DEFAULT | {"rope_theta": 1e6})),
    "llama3_scaled_rope": ("Llama", dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
                                         rope_parameters=LLAMA3)),
    "llama3_tied_head_dim_differs": ("Llama", dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=1,
                                                   head_dim=32, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama_default_rope_mha": ("Llama", dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=3,
                                             rms_norm_eps=1e-5, rope_parameters=DEFAULT)),
}  # fmt: skip
COMMON = dict(vocab_size=331, intermediate_size=160, num_hidden_layers=3, max_position_embeddings=512,
              eos_token_id=[5, 9], bos_token_id=None, pad_token_id=None, tie_word_embeddings=False)  # fmt: skip


def make(name: str, seed: int) -> tuple[Any, list[dict[str, Any]]] | None:
    """The model and its cases, or None where a greedy choice was too close."""
    import torch  # type: ignore[reportMissingImports]
    import transformers

    family, shape = SHAPES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(COMMON | shape))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter_name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                scale = 0.15 if "q_proj" in parameter_name or "k_proj" in parameter_name else 0.06
                parameter.copy_(torch.randn_like(parameter) * scale)
    random = np.random.default_rng(seed)
    cases = []
    for length in LENGTHS:
        prompt = random.integers(0, config.vocab_size, size=length).tolist()
        ids, logprobs, first = list(prompt), [], None
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = torch.topk(logits, 2)
            if float(best.values[0] - best.values[1]) < MARGIN:
                return None
            first = logits[:64] if first is None else first
            token = int(best.indices[0])
            logprobs.append(round(float(torch.log_softmax(logits.double(), -1)[token]), 6))
            ids.append(token)
        assert first is not None
        cases.append({"prompt": prompt, "greedy": ids[length:], "token_logprobs": logprobs,
                      "first_logits": [round(float(x), 5) for x in first]})  # fmt: skip
    return model, cases


def main(names: list[str]) -> None:
    import torch  # type: ignore[reportMissingImports]
    import transformers

    torch.set_num_threads(4)
    print("transformers", transformers.__version__, "torch", torch.__version__)
    for name in names or list(SHAPES):
        seed, made = 0, None
        while made is None:
            seed += 1
            made = make(name, seed)
        model, cases = made
        folder = Path(__file__).parent / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, safe_serialization=True)
        text = json.dumps({"eos": COMMON["eos_token_id"], "dtype": "float32", "cases": cases})
        (folder / "expected.json").write_text(text, encoding="utf-8")
        distinct = len({token for case in cases for token in case["greedy"]})
        print(f"{name}: seed {seed}, {distinct} distinct tokens, files {sorted(p.name for p in folder.iterdir())}")


if __name__ == "__main__":
    main(sys.argv[1:])
