"""Which models can be run, and everything in a config.json that would change a result and isn't. Part of ``config``.

Owns: the list of architectures and the refusals by name. Must not know: jax, arrays, shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# architecture -> (what people call it, max_position_embeddings where config.json gives none)
ARCHITECTURES: dict[str, tuple[str, int]] = {
    "Qwen3ForCausalLM": ("dense Qwen3", 32768),
    "Qwen2ForCausalLM": ("dense Qwen2 and Qwen2.5", 32768),
    "LlamaForCausalLM": ("Llama 2 and 3", 2048),
}
SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``, or model_type where there is none; a text whatever the file holds."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type", "?")
    return first if isinstance(first, str) else repr(first)


def refusals(config: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that ask for what isn't there, each as the user would write it."""
    architecture = architecture_of(config)
    refused = [] if architecture in ARCHITECTURES else [f"architectures=[{architecture!r}]"]
    if config.get("attention_bias") and architecture != "Qwen2ForCausalLM":  # there it is part of the architecture
        refused.append("attention_bias=true")
    for flag in ("mlp_bias", "use_sliding_window"):
        if config.get(flag):
            refused.append(f"{flag}=true")
    kinds = config.get("layer_types") or []
    other = sorted({str(k) for k in kinds} - {"full_attention"}) if isinstance(kinds, list) else [repr(kinds)]
    if other:
        refused.append(f"layer_types with {', '.join(other)}")
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            method = config[name].get("quant_method", "?") if isinstance(config[name], Mapping) else "?"
            refused.append(f"{name} (quant_method={method!r})")
    if config.get("hidden_act", "silu") != "silu":
        refused.append(f"hidden_act={config['hidden_act']!r}")
    return refused


def supported() -> str:
    """What a refusal offers instead."""
    names = ", ".join(f"{name} ({what})" for name, (what, _) in ARCHITECTURES.items())
    return f"{names}, with full attention, silu, no biases but Qwen2's on q, k and v, and no quantization"
