"""batch_invariant: tokens and log-probabilities are the same bits, however a request's tokens came to be computed.

Everything is compared with the same request alone in an engine whose steps hold all of its prompt. The schedules differ
in what has changed sums before: batch and bucket, borders of chunks, prefix hits, preemption, policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, RequestOutput, SamplingParams
from jaxvllm.config import ConfigError
from tests.device.support import VOCAB, make_engine, random_prompts

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
MODEL = ModelConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=64, dtype="float32",
                    max_position_embeddings=128)  # fmt: skip
PROMPTS = random_prompts(6, seed=5, low=2, high=60)
PROMPTS.append(PROMPTS[2] + [7, 7, 3])  # begins as another one does: a prefix hit
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02}, {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.7, "frequency_penalty": 0.3}, {"temperature": 1.0},
]  # fmt: skip
PARAMS = [
    SamplingParams(**wish, seed=40 + i, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for i, wish in enumerate(WISHES)
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"decode_buckets": (1, 2, 3, 8), "token_buckets": (8, 16, 64), "max_num_seqs": 8},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 16, mixed with decoding": {"max_num_batched_tokens": 16, "scheduling_policy": "running_first"},
    "preemption": {"num_blocks": 20, "scheduling_policy": "running_first"},
    "preemption, no prefix cache": {"num_blocks": 20, "enable_prefix_caching": False, "async_steps": 0},
}
CASES = [("bfloat16", name) for name in SCHEDULES] + [("float32", "many buckets"), ("float32", "preemption")]


def engine(dtype: str, backend: str = "xla", **options: Any) -> Engine:
    defaults = {"batch_invariant": True, "enable_processors": True, "warmup": False, "max_logprobs": 3}
    return make_engine(MODEL, **defaults | {"dtype": dtype, "attention_backend": backend} | options)


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    """All that is promised of one request: ids, and log-probabilities as floats that are compared exactly."""
    [completion] = output.outputs
    tables = [*(output.prompt_logprobs or []), *(completion.logprobs or [])]
    flat = [None if table is None else {i: (one.logprob, one.rank) for i, one in table.items()} for table in tables]
    return completion.token_ids, flat


def run(llm: Engine, chosen: list[int] | range = range(len(PROMPTS))) -> list[tuple[Any, ...]]:
    params = [PARAMS[i] for i in chosen]
    return [numbers(output) for output in llm.generate([PROMPTS[i] for i in chosen], params, use_tqdm=False)]


def alone(dtype: str, backend: str = "xla", **options: Any) -> list[tuple[Any, ...]]:
    """Each request alone, from an empty prefix cache, in the smallest decode bucket."""
    with engine(dtype, backend, decode_buckets=(1, 4), **options) as llm:
        found = []
        for i in range(len(PROMPTS)):
            llm.reset_prefix_cache()
            found += run(llm, [i])
        return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[Any, ...]]]:
    return {dtype: alone(dtype) for dtype in ("bfloat16", "float32")}


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=": ".join)
def test_every_schedule_gives_the_same_bits(dtype: str, name: str, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    want = expected[dtype]
    with engine(dtype, **SCHEDULES[name]) as llm:
        assert run(llm) == want
        stats = llm.stats()
        assert (stats["preemptions"] > 0) == name.startswith("preemption")
        assert run(llm, [3, 6, 2]) == [want[3], want[6], want[2]]  # other slots, other neighbours
        if SCHEDULES[name].get("enable_prefix_caching", True):
            assert llm.stats()["prefix_hit_tokens"] > stats["prefix_hit_tokens"]


@pytest.mark.parametrize("size", [7, 64])
def test_a_score_is_what_sampling_said(size: int, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    """A token's log-probability in a decode step is that in a prompt, whole or in chunks."""
    with engine("bfloat16", max_num_batched_tokens=size) as llm:
        for prompt, (ids, tables) in zip(PROMPTS, expected["bfloat16"], strict=True):
            tokens = [*prompt, *ids]
            sampled = [table[token][0] for token, table in zip(tokens[1:], tables[1:], strict=True)]
            np.testing.assert_array_equal(llm.score(tokens), np.float32(sampled))


@pytest.mark.parametrize("shards", [2])
def test_over_shards(shards: int) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": shards}
    want = alone("bfloat16", **options)
    with engine("bfloat16", max_num_batched_tokens=16, scheduling_policy="running_first", **options) as llm:
        assert run(llm) == want


@pytest.mark.parametrize("backend", ["triton_interpret", "mosaic_interpret"])
def test_the_kernels_of_a_gpu(backend: str) -> None:
    """Interpreted: the order of work is a GPU's, the rounding of one product isn't (tests/gpu has that)."""
    prompts, params = [PROMPTS[0][:11], PROMPTS[1][:6], PROMPTS[3][:21]], PARAMS[:3]
    options: dict[str, Any] = {"block_size": 16, "num_blocks": 12, "max_model_len": 48, "token_buckets": None}
    with engine("bfloat16", backend, max_num_batched_tokens=32, decode_buckets=(1, 4), **options) as llm:
        assert llm.stats()["attention_backend"] == backend
        want = [numbers(llm.generate([p], [one], use_tqdm=False)[0]) for p, one in zip(prompts, params, strict=True)]
    with engine("bfloat16", backend, max_num_batched_tokens=8, scheduling_policy="running_first", **options) as llm:
        assert [numbers(output) for output in llm.generate(prompts, params, use_tqdm=False)] == want


def test_the_default_is_not_invariant() -> None:
    """Else the tests above would show nothing."""
    want = alone("bfloat16", batch_invariant=False)
    with engine("bfloat16", batch_invariant=False, **SCHEDULES["many buckets"]) as llm:
        assert run(llm) != want


def test_it_must_be_a_bool() -> None:
    with pytest.raises(ConfigError, match="batch_invariant='yes' must be True or False"):
        engine("float32", batch_invariant="yes")
