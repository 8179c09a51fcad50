"""The variant with processors on a GPU: what XLA made of it, and that it does the same there (make test-gpu)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, SamplingParams
from tests.device.processor_reference import random_params
from tests.device.test_processors import test_two_thousand_random_params_against_the_definitions as definitions

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(
    vocab_size=151_936, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128, dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("backend", [None, "triton"])
def test_definitions_cut(backend: str | None) -> None:
    definitions(backend)


def test_a_captured_step_and_the_same_tokens_in_any_batch_cut() -> None:
    """No loop, sort or branch in the decode step, which would leave the CUDA graph; nothing compiles after warm-up."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, rng.integers(1, 60)).tolist() for _ in range(16)]
    params = [
        SamplingParams(max_tokens=12, seed=i, ignore_eos=True, logprobs=5, **wish)
        for i, wish in enumerate(
            {"temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p,
             "presence_penalty": p.presence_penalty, "repetition_penalty": p.repetition_penalty}
            for p, _ in (random_params(rng, 1000) for _ in prompts)
        )
    ]  # fmt: skip
    with Engine(CONFIG, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256, decode_buckets=(1, 16),
                token_buckets=(256,), gpu_memory_utilization=0.3) as llm:  # fmt: skip
        for bucket in llm.buckets.all[:2]:
            for part in (bucket, bucket.num_seqs):  # a step and its redraw
                text = llm._executor.compiled_text(part)
                found = re.findall(r"= \S+ (while|sort|conditional|custom-call[^\n]*[Tt]op_?[Kk])\(", text)
                assert not found, found
        together = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([p], one, use_tqdm=False)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        assert together == alone
        assert llm.stats()["compiles_after_warmup"] == 0
