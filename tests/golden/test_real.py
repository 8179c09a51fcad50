"""Checks on a real Qwen3 checkpoint that a user has: JAXVLLM_QWEN3=DIR make test-real. Skipped when unset.

Greedy text must be sensible and reproducible, alone and in a batch; logits are compared with transformers
(on the CPU, in the checkpoint's dtype and in float32) where torch is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from tests.gpu.support import last_token_logits

FOLDER = os.environ.get("JAXVLLM_QWEN3", "")
if FOLDER and not Path(FOLDER).is_dir():
    raise pytest.Collector.CollectError(f"JAXVLLM_QWEN3={FOLDER!r} is not a directory: name a checkpoint's folder")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not FOLDER, reason="JAXVLLM_QWEN3 names no checkpoint")]
PROMPTS = ["The capital of France is", "1 2 3 4 5 6 7", "def fibonacci(n):"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(Path(FOLDER), max_num_seqs=4, max_num_batched_tokens=128, max_model_len=512, decode_buckets=(4,),
                token_buckets=(128,), gpu_memory_utilization=0.6) as engine:  # fmt: skip
        yield engine


def test_greedy_text(llm: Engine) -> None:
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in together:
        print(repr(output.prompt), "->", repr(output.text))
    assert "Paris" in together[0].text and "8" in together[1].text and "return" in together[2].text
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    if llm.config.dtype == "float32":
        assert [output.token_ids for output in alone] == [output.token_ids for output in together]
    assert llm.stats()["compiles_after_warmup"] == 0


def test_scores_agree_with_greedy(llm: Engine) -> None:
    """Each greedy token's log-probability is the largest that any single replacement of it gets."""
    output = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    ids = output.prompt_token_ids + output.token_ids
    scores = llm.score(ids)
    assert np.isfinite(scores).all() and (scores <= 1e-3).all()
    first = len(output.prompt_token_ids)
    worse = llm.score([*ids[:first], (ids[first] + 1) % llm.model_config.vocab_size])
    assert scores[first - 1] > worse[first - 1]


def test_logits_against_transformers(llm: Engine) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert llm.tokenizer is not None
    prompts = [np.asarray(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    ours = last_token_logits(llm, prompts)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", local_files_only=True).eval()

    def reference(dtype: str) -> np.ndarray:
        with torch.no_grad():
            model.to(getattr(torch, dtype))
            rows = [model(torch.tensor(prompt[None])).logits[0, -1].float().numpy() for prompt in prompts]
        return np.stack(rows)

    own, exact = reference(str(llm.config.dtype)), reference("float32")

    def error(logits: np.ndarray) -> float:
        return float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))

    assert error(ours) <= max(1.2 * error(own), 1e-4), (error(ours), error(own))
