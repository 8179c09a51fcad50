"""The models that benchmarks know by name, and the floor of their steps on an H200.

The floor: a decode step can't take less than the KV bytes it reads, plus the larger of its weight bytes and
its matrix operations, at the ceilings that were measured on one NVIDIA H200; a prompt not less than its
operations.
"""

from collections.abc import Sequence

from jaxvllm.config import DTYPE_BYTES, ModelConfig

READ_BYTES_PER_S = 4.15e12
BF16_OPERATIONS_PER_S = 775e12

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    dtype="float32",
)
"""Only to see that a benchmark runs, on any machine."""


def model_config(name: str) -> ModelConfig:
    """Raises ValueError for a name that isn't known."""
    known = {"qwen3-0.6b": ModelConfig.qwen3_0_6b, "qwen3-8b": ModelConfig.qwen3_8b, "tiny": lambda: TINY}
    if name not in known:
        raise ValueError(f"config={name!r} is unknown; known: {', '.join(known)}")
    return known[name]()


def layer_weights(config: ModelConfig) -> int:
    """Matrix elements that every token passes through, without embedding and head."""
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    per_layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return per_layer * config.num_hidden_layers


def decode_floor_s(config: ModelConfig, context_lens: Sequence[int]) -> float:
    """Seconds of one decode step over sequences of these context lengths."""
    tokens, batch = sum(context_lens), len(context_lens)
    weights = layer_weights(config) + config.vocab_size * config.hidden_size
    matrices = max(weights * DTYPE_BYTES[config.dtype] / READ_BYTES_PER_S, 2 * weights * batch / BF16_OPERATIONS_PER_S)
    return tokens * config.kv_bytes_per_token() / READ_BYTES_PER_S + matrices


def prefill_floor_s(config: ModelConfig, prompt_lens: Sequence[int]) -> float:
    """Seconds of computing these prompts: matrices, causal attention, the head for each last token."""
    matrices = 2 * layer_weights(config) * sum(prompt_lens)
    head = 2 * config.vocab_size * config.hidden_size * len(prompt_lens)
    pairs = sum(length * length / 2 for length in prompt_lens)
    attention = 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return (matrices + head + attention) / BF16_OPERATIONS_PER_S


def workload_floor_s(config: ModelConfig, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
    """Seconds of a whole batch: all prompts, then decode steps over those that still run."""
    seconds = prefill_floor_s(config, prompt_lens)
    for step in range(1, max(output_lens)):
        contexts = [p + step for p, n in zip(prompt_lens, output_lens, strict=True) if n > step]
        seconds += decode_floor_s(config, contexts)
    return seconds
