"""A whole engine on the kernels that a GPU runs by default, interpreted: the same tokens as on XLA's path."""

from __future__ import annotations

import pytest

from jaxvllm import ModelConfig, SamplingParams
from jaxvllm.runtime import step
from tests.device.support import VOCAB, make_engine

MODEL = ModelConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=64, dtype="float32",
                    max_position_embeddings=128)  # fmt: skip


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_fused_step_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, decoding, greedy and seeded rows; products whole in ragged steps, in parts in decode steps."""
    monkeypatch.setattr(step, "PARTS_TOKENS", range(4, 5))
    prompts = [[5, 9, 2, 7, 7, 1, 30, 4, 8, 8, 3], [11, 3], [5, 9, 2, 7, 6]]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=6, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 0.8, 1.3))
    ]
    tokens = []
    for backend in ("xla", "triton_interpret"):
        with make_engine(
            MODEL, attention_backend=backend, num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
            decode_buckets=(4,), token_buckets=(16,), warmup=False,
        ) as engine:  # fmt: skip
            assert engine.stats()["attention_backend"] == backend
            tokens.append([output.token_ids for output in engine.generate(prompts, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]
