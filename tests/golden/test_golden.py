"""Tiny checkpoints against what Hugging Face computed for them in float32 (see tests/golden_data/README.md).

Greedy tokens must be equal, token log-probabilities within 1e-4: one prompt at a time and all at once, at three block
sizes, with prompts chunked to 5 tokens, and in the smallest pool that forces preemptions.

Compiling steps is most of the time. The three tests of a checkpoint and a block size share the decode step, two of them
the one of 192 tokens, through the session's compiled programs (tests/conftest.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, SamplingParams
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler

DATA = Path(__file__).parent.parent / "golden_data"
NAMES = sorted(path.name for path in DATA.iterdir() if (path / "expected.json").is_file())
QWEN3 = [name for name in NAMES if ModelConfig.from_dir(DATA / name).architecture == "Qwen3ForCausalLM"]
# Block sizes meet a model in the attention alone, through its heads and head_dim. So every size for Qwen3, but one size
# for the other families, which share all but their forward with it.
CASES = [(name, size) for name in NAMES for size in (4, 16, 64) if name in QWEN3 or size == 16]
# Where chunks meet blocks is the plan's matter, which knows no model: every size for one. The others' attention has
# contexts longer than its queries, at each block size, in test_tokens_and_logprobs: with prefix hits.
CHUNKED = [(name, size) for name, size in CASES if size == 16 or name == "tied_head_dim_differs"]
LOGPROB_TOLERANCE = 1e-4


def expected(name: str) -> list[dict]:
    """The cases, longest prompt first (so that a small pool has something to preempt)."""
    cases = json.loads((DATA / name / "expected.json").read_text())["cases"]
    return sorted(cases, key=lambda case: -len(case["prompt"]))


def greedy(case: dict) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=len(case["greedy"]), ignore_eos=True)


def engine(name: str, block_size: int, **options: object) -> Engine:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 192, "decode_buckets": (4,), "token_buckets": (192,),
                "max_model_len": 256, "num_blocks": 512 // block_size, "enable_processors": False}  # fmt: skip
    return Engine(DATA / name, block_size=block_size, **(defaults | options))  # type: ignore[arg-type]


def check_scores(llm: Engine, case: dict) -> None:
    scores = llm.score(case["prompt"] + case["greedy"])[-len(case["greedy"]) :]
    np.testing.assert_allclose(scores, case["token_logprobs"], atol=LOGPROB_TOLERANCE, rtol=0)


def check_all_at_once(llm: Engine, cases: list[dict]) -> None:
    outputs = llm.generate([case["prompt"] for case in cases], [greedy(case) for case in cases], use_tqdm=False)
    assert [output.token_ids for output in outputs] == [case["greedy"] for case in cases]
    assert all(output.text == "" and output.outputs[0].finish_reason == "length" for output in outputs)


@pytest.mark.parametrize(("name", "block_size"), CASES)
def test_tokens_and_logprobs(name: str, block_size: int) -> None:
    cases = expected(name)
    with engine(name, block_size) as llm:
        for case in cases:
            assert llm.generate(case["prompt"], greedy(case), use_tqdm=False)[0].token_ids == case["greedy"]
            check_scores(llm, case)
        check_all_at_once(llm, cases)  # with prefix hits of the runs before
        llm.reset_prefix_cache()
        check_all_at_once(llm, cases)
        stats = llm.stats()
        assert stats["preemptions"] == 0 and stats["compiles_after_warmup"] == 0


@pytest.mark.parametrize(("name", "block_size"), CHUNKED)
def test_prompts_chunked_to_five_tokens(name: str, block_size: int) -> None:
    cases = expected(name)
    with engine(name, block_size, max_num_batched_tokens=5, token_buckets=(5,)) as llm:
        check_all_at_once(llm, cases)
        if block_size == 16:  # one more step to compile: at one block size
            check_scores(llm, cases[0])


@pytest.mark.parametrize(("name", "block_size"), [case for case in CASES if case[1] < 64 and case[0] in QWEN3])
def test_smallest_pool_with_preemptions(name: str, block_size: int) -> None:
    """The pool is made small by taking blocks out of it: a smaller cache would be other steps to compile."""
    cases = expected(name)
    num_blocks = smallest_preempting_pool(cases, block_size)
    with engine(name, block_size) as llm:
        pool = llm._scheduler.pool
        pool.take(pool.num_blocks - num_blocks)
        check_all_at_once(llm, cases)
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["blocks_free"] == num_blocks


def smallest_preempting_pool(cases: list[dict], block_size: int) -> int:
    """By the scheduler alone, fed with the recorded tokens; it's the smallest pool that can hold every request."""
    longest = max(len(case["prompt"]) + len(case["greedy"]) - 1 for case in cases)
    for num_blocks in range(-(-longest // block_size), 1000):
        scheduler = Scheduler(block_size=block_size, num_blocks=num_blocks, max_num_seqs=4,
                              max_num_batched_tokens=192, max_model_len=256, max_running=4)  # fmt: skip
        for i, case in enumerate(cases):
            scheduler.add(Request.create(str(i), i, case["prompt"], greedy(case), model_eos=(), engine_seed=0))
        while scheduler.has_unfinished():
            step = scheduler.schedule()
            assert step is not None
            tokens = [cases[r.index]["greedy"][r.num_known - r.num_prompt] if samples else 0
                      for r, samples in zip(step.requests, step.samples, strict=True)]  # fmt: skip
            scheduler.commit(step, np.asarray(tokens, np.int32))
        if scheduler.counters.preemptions > 0:
            return num_blocks
    raise AssertionError("no pool preempts")
