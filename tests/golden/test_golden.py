"""Tiny checkpoints against what Hugging Face computed for them in float32 (see tests/golden_data/README.md).

Greedy tokens must be equal, token log-probabilities within 1e-4: one prompt at a time and all at once, at three block
sizes, with prompts chunked to 5 tokens, and in the smallest pool that forces preemptions.

Compiling steps is most of the time, so the tests of a checkpoint and a block size share an engine. What makes them
differ is the scheduler's matter: how many tokens a step may have, how many blocks there are. Buckets are small, since a
step costs what its bucket holds, needed or not; those of one checkpoint take all prompts whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, SamplingParams
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.kernels import xla
from tests.kept_programs import kept_programs

DATA = Path(__file__).parent.parent / "golden_data"
NAMES = sorted(path.name for path in DATA.iterdir() if (path / "expected.json").is_file())
QWEN3 = [name for name in NAMES if ModelConfig.from_dir(DATA / name).architecture == "Qwen3ForCausalLM"]
# Block sizes meet a model in the attention alone, through its heads and head_dim. So every size for Qwen3, but one size
# for the other families, which share all but their forward with it. (In this order: pytest puts the tests that share an
# engine side by side if it has the same place in all their lists.)
CASES = [(name, size) for size in (16, 4, 64) for name in NAMES if name in QWEN3 or size == 16]
# Where chunks meet blocks is the plan's matter, which knows no model: every size for one.
CHUNKED = [(name, size) for name, size in CASES if size == 16 or name == "tied_head_dim_differs"]
SMALL_BLOCKS = [case for case in CASES if case[1] < 64]  # no pool of larger ones preempts
LOGPROB_TOLERANCE = 1e-4
MODEL_LEN = 176  # the longest recorded prompt and its tokens: 174
LOOPED = 16
WHOLE_PROMPTS = "yarn_factor_4"  # its steps hold all prompts at once, 191 tokens; the others' the three shorter ones
PREFIX_HITS = "tied_head_dim_differs"  # where the pool has room for what is cached; the scheduler's matter, too
NAMED = "{0[0]}-{0[1]}".format  # a case


def expected(name: str) -> list[dict]:
    """The cases, longest prompt first (so that a small pool has something to preempt)."""
    cases = json.loads((DATA / name / "expected.json").read_text())["cases"]
    return sorted(cases, key=lambda case: -len(case["prompt"]))


def greedy(case: dict) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=len(case["greedy"]), ignore_eos=True)


def engine(name: str, block_size: int, **options: object) -> Engine:
    tokens = 192 if name == WHOLE_PROMPTS else 48
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": tokens, "decode_buckets": (4,), "token_buckets": (tokens,),
                "max_model_len": MODEL_LEN, "num_blocks": 512 // block_size, "enable_processors": False}  # fmt: skip
    # attention looks at its keys in a loop of chunks at one block size, at all of them at once at the others
    chunk = xla.CHUNK_TOKENS if block_size == LOOPED else MODEL_LEN + block_size
    with kept_programs(many_steps=True), pytest.MonkeyPatch.context() as patched:
        patched.setattr(xla, "CHUNK_TOKENS", chunk)
        return Engine(DATA / name, block_size=block_size, **(defaults | options))  # type: ignore[arg-type]


def check_scores(llm: Engine, case: dict) -> None:
    scores = llm.score(case["prompt"] + case["greedy"])[-len(case["greedy"]) :]
    np.testing.assert_allclose(scores, case["token_logprobs"], atol=LOGPROB_TOLERANCE, rtol=0)


def check_all_at_once(llm: Engine, cases: list[dict]) -> None:
    outputs = llm.generate([case["prompt"] for case in cases], [greedy(case) for case in cases], use_tqdm=False)
    assert [output.token_ids for output in outputs] == [case["greedy"] for case in cases]
    assert all(output.text == "" and output.outputs[0].finish_reason == "length" for output in outputs)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest):
    """(the recorded cases, an engine) of a name and a block size."""
    name, block_size = request.param
    with engine(name, block_size) as llm:
        yield expected(name), llm
        assert llm.stats()["compiles_after_warmup"] == 0
        assert llm.stats()["blocks_free"] == 512 // block_size


@pytest.mark.parametrize("shared", CASES, indirect=True, ids=NAMED)
def test_tokens_and_logprobs(shared: tuple[list[dict], Engine]) -> None:
    cases, llm = shared
    llm.reset_prefix_cache()
    before = llm.stats()["preemptions"]
    for case in cases:
        assert llm.generate(case["prompt"], greedy(case), use_tqdm=False)[0].token_ids == case["greedy"]
        check_scores(llm, case)
    if llm.model_config == ModelConfig.from_dir(DATA / PREFIX_HITS) and llm.config.block_size < 64:
        hits = llm.stats()["prefix_hit_tokens"]
        check_all_at_once(llm, cases)
        assert llm.stats()["prefix_hit_tokens"] > hits
    llm.reset_prefix_cache()
    check_all_at_once(llm, cases)
    assert llm.stats()["preemptions"] == before


@pytest.mark.parametrize("shared", CHUNKED, indirect=True, ids=NAMED)
def test_prompts_chunked_to_five_tokens(shared: tuple[list[dict], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    cases, llm = shared
    llm.reset_prefix_cache()
    before = llm.stats()
    monkeypatch.setattr(llm._scheduler, "max_num_batched_tokens", 5)
    check_all_at_once(llm, cases)
    steps, tokens = (llm.stats()[name] - before[name] for name in ("prefill_steps", "prefill_tokens"))
    assert tokens > 100 and steps >= tokens / 5


def test_a_bucket_of_five_tokens() -> None:
    """Chunks as above, in a step made for them, smaller than a tile; scores too."""
    cases = expected("tied_head_dim_differs")
    with engine("tied_head_dim_differs", 16, max_num_batched_tokens=5, token_buckets=(5,)) as llm:
        check_all_at_once(llm, cases)
        check_scores(llm, cases[0])


@pytest.mark.parametrize("shared", SMALL_BLOCKS, indirect=True, ids=NAMED)
def test_smallest_pool_with_preemptions(shared: tuple[list[dict], Engine]) -> None:
    """The pool is made small by taking blocks out of it: a smaller cache would be other steps to compile."""
    cases, llm = shared
    llm.reset_prefix_cache()
    before = llm.stats()["preemptions"]
    pool = llm._scheduler.pool
    num_blocks = smallest_preempting_pool(cases, pool.block_size)
    taken = pool.take(pool.num_blocks - num_blocks)
    try:
        check_all_at_once(llm, cases)
        assert llm.stats()["preemptions"] > before
        assert llm.stats()["blocks_free"] == num_blocks
    finally:
        pool.release(taken)


def smallest_preempting_pool(cases: list[dict], block_size: int) -> int:
    """By the scheduler alone, fed with the recorded tokens; it's the smallest pool that can hold every request."""
    longest = max(len(case["prompt"]) + len(case["greedy"]) - 1 for case in cases)
    for num_blocks in range(-(-longest // block_size), 1000):
        scheduler = Scheduler(block_size=block_size, num_blocks=num_blocks, max_num_seqs=4,
                              max_num_batched_tokens=192, max_model_len=MODEL_LEN, max_running=4)  # fmt: skip
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
