"""batch_invariant on a GPU: in bfloat16, tokens and log-probabilities are the same bits in every schedule.

Four layers of a full-size model's shapes; each request alone against all together, in other buckets, in chunks with odd
borders, mixed with decoding, after prefix hits and preemptions; a decode step's numbers against those of a prompt.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, SamplingParams
from tests.device.test_batch_invariant import WISHES, numbers

pytestmark = pytest.mark.gpu
VOCAB = 151_936
BASE: dict[str, Any] = dict(vocab_size=VOCAB, num_hidden_layers=4, head_dim=128, max_position_embeddings=4096)
MODELS = {
    "Qwen3": ModelConfig(**BASE, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                         num_key_value_heads=8),
    "Llama": ModelConfig(**BASE, architecture="LlamaForCausalLM", hidden_size=1024, intermediate_size=2816,
                         num_attention_heads=12, num_key_value_heads=4),
}  # fmt: skip
LENGTHS = (1, 2000, 17, 64, 65, 130, 700, 1999, 333, 1, 1024, 257)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in LENGTHS]
PROMPTS[6][:512] = PROMPTS[1][:512]  # a prefix hit, whenever 1 came before
PARAMS = [
    SamplingParams(**WISHES[i % len(WISHES)], seed=i, max_tokens=48, ignore_eos=True, logprobs=5,
                   prompt_logprobs=2 if i % 2 else None)
    for i in range(len(PROMPTS))
]  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "odd chunks": {"max_num_batched_tokens": 333, "token_buckets": (64, 333)},
    "chunks mixed with decoding": {"max_num_batched_tokens": 512, "token_buckets": (16, 512),
                                   "scheduling_policy": "running_first"},
    "preemption": {"num_blocks": 52, "decode_buckets": (4, 16), "enable_prefix_caching": False},
}  # fmt: skip


def engine(model: str, backend: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "bfloat16", "max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 2304,
        "num_blocks": 400, "decode_buckets": (1, 16), "token_buckets": (64, 2048), "gpu_memory_utilization": 0.4,
        "batch_invariant": True, "attention_backend": backend, "max_logprobs": 5, "warmup": False,
    }  # fmt: skip
    return Engine(MODELS[model], **defaults | options)


@pytest.mark.parametrize(("model", "backend"), [("Qwen3", "auto"), ("Qwen3", "triton"), ("Llama", "auto")])
def test_every_schedule_gives_the_same_bits_cut(model: str, backend: str) -> None:
    want = []
    with engine(model, backend) as llm:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            llm.reset_prefix_cache()
            want.append(numbers(llm.generate([prompt], [params], use_tqdm=False)[0]))
    wrong: list[str] = []
    for name, options in SCHEDULES.items():
        with engine(model, backend, **options) as llm:
            for turn in (1, 2):  # the second finds what the first left in the prefix cache
                got = [numbers(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
                wrong += [f"{name}, turn {turn}: {differences(a, b)} of request {i} (prompt of {LENGTHS[i]})"
                          for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]  # fmt: skip
            stats = llm.stats()
            assert (stats["preemptions"] > 0) == (name == "preemption")
            assert (stats["prefix_hit_tokens"] > 0) == (name != "preemption")
            for i, (prompt, (ids, tables)) in enumerate(zip(PROMPTS, want, strict=True)):
                sampled = [table[token][0] for token, table in zip(ids, tables[-len(ids) :], strict=True)]
                score = llm.score([*prompt, *ids])[len(prompt) - 1 :]
                apart = np.abs(score - np.array(sampled, np.float32))
                if apart.any():
                    wrong.append(f"{name}: score of request {i}: {np.count_nonzero(apart)} apart, max {apart.max()}")
    assert not wrong, f"{jax.devices()[0].device_kind}, {backend}: " + "\n".join(wrong)


def differences(a: tuple[Any, ...], b: tuple[Any, ...]) -> str:
    """How much of what `numbers` gives differs."""
    tokens = [i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y]
    tables = [i for i, (x, y) in enumerate(zip(a[1], b[1], strict=True)) if x != y]
    return f"tokens from {tokens[0] if tokens else None}, log-probabilities at {tables[:3]} ({len(tables)} places)"


def test_the_default_is_not_invariant_cut() -> None:
    """Else the test above would show nothing."""
    with engine("Qwen3", "auto", batch_invariant=False) as whole:
        want = whole.score(PROMPTS[6])
    with engine("Qwen3", "auto", batch_invariant=False, **SCHEDULES["odd chunks"]) as chunked:
        assert not np.array_equal(chunked.score(PROMPTS[6]), want)
