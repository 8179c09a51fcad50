"""batch_invariant: tokens and log-probabilities are the same bits, however a request's tokens came to be computed.

Everything is compared with the same request alone in an engine whose steps hold all of its prompt. The schedules differ
in what has changed sums before: batch and bucket, borders of chunks, prefix hits, preemption, policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, RequestOutput, SamplingParams
from jaxvllm.config import ConfigError
from jaxvllm.runtime.select import nucleus_in_whole_numbers, sort_keys
from tests.device.support import VOCAB, make_engine, random_prompts

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
LAYERS = {"bfloat16": 1, "float32": 2}  # one has every sum that there is, and takes half the time
MODELS = {
    dtype: ModelConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=layers,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=64, dtype="float32",
                       max_position_embeddings=128)
    for dtype, layers in LAYERS.items()
}  # fmt: skip
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
# all in a pool so small that requests are preempted; shapes are few, since compiling them is what takes the time
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "other buckets": {"decode_buckets": (1, 2, 4), "token_buckets": (16, 64)},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 16, mixed with decoding": {"max_num_batched_tokens": 16, "scheduling_policy": "running_first"},
    "no prefix cache, no step ahead": {"enable_prefix_caching": False, "async_steps": 0},
}
USUAL = ("chunks of 16, mixed with decoding",)
CASES = [
    pytest.param(dtype, name, marks=() if dtype == "bfloat16" and name in USUAL else pytest.mark.slow)
    for dtype in ("bfloat16", "float32")
    for name in SCHEDULES
]
ALL = range(len(PROMPTS))


def engine(dtype: str, backend: str = "xla", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"batch_invariant": True, "enable_processors": True, "warmup": False, "max_logprobs": 3,
                                "num_blocks": 20}  # fmt: skip
    defaults |= {"dtype": dtype, "attention_backend": backend}
    return make_engine(MODELS[dtype], **defaults | options)


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    """All that is promised of one request: ids, and log-probabilities as floats that are compared exactly."""
    [completion] = output.outputs
    tables = [*(output.prompt_logprobs or []), *(completion.logprobs or [])]
    flat = [None if table is None else {i: (one.logprob, one.rank) for i, one in table.items()} for table in tables]
    return completion.token_ids, flat


def run(llm: Engine, chosen: Sequence[int] = ALL) -> list[tuple[Any, ...]]:
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


class _Expected(dict):
    """Of a dtype, computed when it is asked for."""

    def __missing__(self, dtype: str) -> list[tuple[Any, ...]]:
        self[dtype] = alone(dtype)
        return self[dtype]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[Any, ...]]]:
    return _Expected()


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_every_schedule_gives_the_same_bits(dtype: str, name: str, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    want = expected[dtype]
    with engine(dtype, **SCHEDULES[name]) as llm:
        assert run(llm) == want
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert run(llm, [3, 6, 2]) == [want[3], want[6], want[2]]  # other slots, other neighbours
        if SCHEDULES[name].get("enable_prefix_caching", True):
            assert llm.stats()["prefix_hit_tokens"] > stats["prefix_hit_tokens"]


@pytest.mark.parametrize("size", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_a_score_is_what_sampling_said(size: int, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    """A token's log-probability in a decode step is that in a prompt, whole or in chunks."""
    with engine("bfloat16", max_num_batched_tokens=size) as llm:
        for prompt, (ids, tables) in zip(PROMPTS, expected["bfloat16"], strict=True):
            tokens = [*prompt, *ids]
            sampled = [table[token][0] for token, table in zip(tokens[1:], tables[1:], strict=True)]
            np.testing.assert_array_equal(llm.score(tokens), np.array(sampled, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2])
def test_over_shards(shards: int) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": shards, "enable_processors": False}
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=6, ignore_eos=True) for i in range(4)]
    prompts = PROMPTS[:4]
    with engine("bfloat16", decode_buckets=(1, 4), **options) as llm:
        ids = [llm.generate(one, wish, use_tqdm=False)[0].token_ids for one, wish in zip(prompts, params, strict=True)]
        scores = [llm.score([*prompt, *new]) for prompt, new in zip(prompts, ids, strict=True)]
    with engine("bfloat16", max_num_batched_tokens=5, scheduling_policy="running_first", **options) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == ids
        for prompt, new, score in zip(prompts, ids, scores, strict=True):
            np.testing.assert_array_equal(llm.score([*prompt, *new]), score)


@pytest.mark.slow
def test_the_kernels_of_a_gpu() -> None:
    """Interpreted: the order of work is a GPU's, the rounding of one product isn't (tests/gpu has that)."""
    prompts = [PROMPTS[0][:11], PROMPTS[1][:6], PROMPTS[3][:21]]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)]
    options: dict[str, Any] = {"num_blocks": 12, "max_model_len": 48, "enable_processors": False}
    with engine("bfloat16", "triton_interpret", max_num_batched_tokens=32, decode_buckets=(1, 4), **options) as llm:
        assert llm.stats()["attention_backend"] == "triton_interpret"
        ids = [llm.generate(one, wish, use_tqdm=False)[0].token_ids for one, wish in zip(prompts, params, strict=True)]
        scores = [llm.score([*prompt, *new]) for prompt, new in zip(prompts, ids, strict=True)]
    options |= {"max_num_batched_tokens": 5, "scheduling_policy": "running_first"}
    with engine("bfloat16", "triton_interpret", **options) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == ids
        for prompt, new, score in zip(prompts, ids, scores, strict=True):
            np.testing.assert_array_equal(llm.score([*prompt, *new]), score)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_default_is_not_invariant(invariant: bool) -> None:
    """Else the tests above would show nothing: a step of one token against one of 64."""
    options: dict[str, Any] = {"batch_invariant": invariant, "enable_processors": False}
    with engine("bfloat16", **options) as whole:
        wanted = whole.score(PROMPTS[2])
    with engine("bfloat16", max_num_seqs=1, max_num_batched_tokens=1, **options) as single:
        assert np.array_equal(single.score(PROMPTS[2]), wanted) == invariant


def test_it_must_be_a_bool() -> None:
    with pytest.raises(ConfigError, match="batch_invariant='yes' must be True or False"):
        engine("float32", batch_invariant="yes")


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
def test_a_nucleus_in_whole_numbers_is_the_one_of_float64(spread: float) -> None:
    """The smallest set of the most probable that holds top_p of the mass, but for a ten thousandth of it."""
    rng = np.random.default_rng(int(spread * 10))
    logits = np.sort(rng.normal(size=(6, 150_000)) * spread)[:, ::-1]
    weights = np.exp(logits - logits[:, :1]).astype(np.float32)
    top_p = np.array([0.01, 0.5, 0.9, 0.99, 0.999, 1e-9], np.float32)
    keys = np.asarray(sort_keys(jnp.asarray(weights)))
    on_device = jnp.asarray(keys), jnp.asarray(weights), jnp.asarray(top_p)
    low = nucleus_in_whole_numbers(*on_device, lambda x: x, unroll=False)
    for row, kept in enumerate(keys >= np.asarray(low)[:, None]):
        mass = weights[row].astype(np.float64) / weights[row].sum(dtype=np.float64)
        rest = mass[kept][mass[kept] > mass[kept].min()].sum()  # without the least probable of them
        assert mass[kept].sum() >= top_p[row] - 1e-4 and rest < top_p[row] + 1e-4
