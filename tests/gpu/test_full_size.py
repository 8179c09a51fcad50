"""Full-size random models against transformers on the same GPU (make test-gpu; needs torch and transformers there)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from tests.gpu.support import last_token_logits, record

pytestmark = pytest.mark.gpu
NEW_TOKENS = 32


@pytest.fixture(scope="module", params=["cut", "0.6b", "8b"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    folder = tmp_path_factory.mktemp(request.param.replace(".", "_"))
    script = Path(__file__).parent / "reference.py"
    subprocess.run([sys.executable, str(script), request.param, str(folder)], check=True)
    yield request.param, folder / "model", np.load(folder / "expected.npz")
    for file in (folder / "model").iterdir():  # 16 GB
        file.unlink()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_against_transformers(case: tuple[str, Path, Any]) -> None:
    name, path, expected = case
    prompts = [expected[f"prompt_{i}"] for i in range(4)]
    row: dict[str, Any] = {"model": name}
    with Engine(path, max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, decode_buckets=(8,),
                token_buckets=(1024,), gpu_memory_utilization=0.5) as llm:  # fmt: skip
        logits = last_token_logits(llm, prompts)
        if name == "cut":
            row["float32_vs_float64"] = relative(logits, expected["logits_float64"])
            row["transformers_float32_vs_float64"] = relative(expected["logits_own"], expected["logits_float64"])
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
                                   use_tqdm=False)  # fmt: skip
            row["greedy_equal"] = bool(np.array_equal([o.token_ids for o in outputs], expected["greedy"]))
        else:
            row["bf16_vs_float32"] = relative(logits, expected["logits_float32"])
            row["transformers_bf16_vs_float32"] = relative(expected["logits_own"], expected["logits_float32"])
        row["compiles_after_warmup"] = llm.stats()["compiles_after_warmup"]
    error = "relative error, last-token logits"
    if name == "cut":
        record([("cut float32 against float64", row["float32_vs_float64"], error, None),
                ("cut float32 against float64, transformers", row["transformers_float32_vs_float64"], error, None),
                ("cut greedy tokens equal to transformers'", float(row["greedy_equal"]), "of 1", 1.0)])  # fmt: skip
    else:
        theirs = row["transformers_bf16_vs_float32"]
        record([(f"{name} bf16 against float32", row["bf16_vs_float32"], error, None),
                (f"{name} bf16 against float32, transformers", theirs, error, None)])  # fmt: skip
    print(json.dumps(row))
    assert row["compiles_after_warmup"] == 0
    if name == "cut":
        assert row["float32_vs_float64"] < 1e-5, row
        assert row["greedy_equal"], row
    else:
        assert row["bf16_vs_float32"] <= 1.1 * row["transformers_bf16_vs_float32"], row
