"""Makes a random Qwen3 checkpoint on a GPU and records what transformers computes for it; run as its own process.

    python tests/gpu/reference.py {0.6b,8b,cut} FOLDER

writes FOLDER/model (Hugging Face format) and FOLDER/expected.npz: prompts, last-token logits in the checkpoint's
dtype and in float32 (cut: also float64), and for "cut" greedy tokens in float32. Needs torch and transformers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
    "cut": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, vocab_size=4099, tie_word_embeddings=False),
}  # fmt: skip
PROMPT_LENGTHS = (1, 63, 200, 513)
NEW_TOKENS = 32


def main(name: str, folder: Path) -> None:
    import torch  # type: ignore[reportMissingImports]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    started = time.time()
    dtype = torch.float32 if name == "cut" else torch.bfloat16
    config = Qwen3Config(
        **SHAPES[name],
        max_position_embeddings=40960,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():  # larger than the default 0.02, so that attention and logits are far from uniform
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "q_proj" in parameter_name or "k_proj" in parameter_name:
                parameter.mul_(3.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model", max_shard_size="4GB")
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, config.vocab_size, size=n) for n in PROMPT_LENGTHS]
    saved: dict[str, np.ndarray] = {f"prompt_{i}": prompt for i, prompt in enumerate(prompts)}

    @torch.no_grad()
    def logits(m: Any) -> np.ndarray:
        rows = [m(torch.tensor(p[None], device="cuda")).logits[0, -1].double().cpu().numpy() for p in prompts]
        return np.stack(rows)

    saved["logits_own"] = logits(model).astype(np.float32)
    if name == "cut":
        greedy = []
        for prompt in prompts:
            ids = torch.tensor(prompt[None], device="cuda")
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
            greedy.append(out[0, ids.shape[1] :].cpu().numpy())
        saved["greedy"] = np.stack(greedy)
        saved["logits_float64"] = logits(model.double())
    else:
        model.to(torch.float32)
        saved["logits_float32"] = logits(model).astype(np.float32)
    np.savez(folder / "expected.npz", **saved)  # type: ignore[arg-type]
    print(f"reference {name}: {time.time() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
