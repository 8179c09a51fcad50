"""SamplingParams and outputs: vLLM's meanings, and errors that name field, value and limit."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import CompletionOutput, RequestOutput, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 16, False)
    assert (params.n, params.top_p, params.top_k, params.min_p, params.min_tokens) == (1, 1.0, 0, 0.0, 0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.logprobs is params.prompt_logprobs is params.logit_bias is params.allowed_token_ids is None
    assert params.stop == params.bad_words == () and not params.needs_processors
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)
    assert params.stop_token_ids == ()
    assert params.seed is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),  # infinite as float32
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", [1, -2]),
        ("stop_token_ids", [1, 2.0]),
        ("stop_token_ids", [None]),
        ("n", 0),
        ("n", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 17),  # max_tokens is 16
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
        ("stop", 5),
        ("stop", b"x"),
        ("stop", ["a", ""]),
        ("stop", [None]),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "2"}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-5]),
        ("allowed_token_ids", 5),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [5]),
        ("detokenize", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "no"),
        ("output_kind", 1),
        ("seed", 1.0),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", "x"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    inside = (value[-1:] or [value]) if isinstance(value, list) else [value]
    inside = [*value, *value.values()] if isinstance(value, dict) else inside
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert any(str(one).strip("'") in str(caught.value) for one in inside)


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop_token_ids=np.array([7, 8]),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
    )
    expected = SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True, stop_token_ids=(7, 8), seed=2**64 - 1)
    assert params == expected
    values = [params.temperature, params.max_tokens, params.ignore_eos, params.stop_token_ids, params.seed]
    assert [type(value) for value in values] == [float, int, bool, tuple, int]
    assert hash(params) == hash(expected)


def test_numbers_of_jax_become_plain_ones_but_no_keys_and_nothing_traced() -> None:
    arrays = {"seed": jnp.uint32(7), "temperature": jnp.float32(0.5), "stop_token_ids": jnp.array([7, 8])}
    params = SamplingParams(**arrays, max_tokens=np.array(3))  # type: ignore[arg-type]
    assert params == SamplingParams(seed=7, temperature=0.5, stop_token_ids=(7, 8), max_tokens=3)
    assert [type(value) for value in (params.seed, params.temperature, params.max_tokens)] == [int, float, int]
    for wrong in (jnp.float32(7), jnp.array(True), jnp.array([7]), jax.random.key(7), jax.random.PRNGKey(7)):
        with pytest.raises(ValueError, match=r"(?s)seed=.* must be an integer"):
            SamplingParams(seed=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)seed=.* must be an integer"):
        jax.jit(lambda seed: SamplingParams(seed=seed).n)(7)


def test_special_values_as_in_vllm() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    assert SamplingParams(temperature=0).temperature == 0.0
    assert SamplingParams(temperature=9e-6).temperature == 0.0  # greedy, so that logits / temperature is finite
    assert SamplingParams(temperature=1e-4).temperature == 1e-4


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_output_shortcuts_are_those_of_the_first_completion() -> None:
    completion = CompletionOutput(index=0, text="abc", token_ids=[1, 2])
    assert not completion.finished()
    output = RequestOutput("r", None, [9], [completion], finished=False)
    assert output.text == "abc"
    assert output.token_ids is completion.token_ids
    assert CompletionOutput(0, "", [], finish_reason="length").finished()


def test_wishes_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="n=2 must be 1 at temperature=0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ValueError, match="min_tokens=3 must be at most max_tokens=2"):
        SamplingParams(min_tokens=3, max_tokens=2)
    with pytest.raises(ValueError, match=r"stop=.* needs text"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99


def test_the_new_fields_are_made_uniform() -> None:
    wish: dict[str, Any] = {"logit_bias": {"7": 1}, "allowed_token_ids": np.array([3]), "bad_words": ["a", [1]]}
    params = SamplingParams(stop="end", top_k=-1, **wish)
    assert (params.stop, params.top_k, params.logit_bias) == (("end",), 0, {7: 1.0})
    assert (params.allowed_token_ids, params.bad_words) == ((3,), ("a", (1,)))
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias={}) == SamplingParams()
    same = SamplingParams(stop=["end"], logit_bias={7: 1}, allowed_token_ids=[3], bad_words=["a", [1]])
    assert params == same and hash(params) == hash(same)


@pytest.mark.parametrize(
    ("wish", "needs"),
    [
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0}, False),  # greedy: filters change nothing
        ({"top_k": 0}, False),
        ({"logprobs": 0}, True),
        ({"prompt_logprobs": 3}, False),  # read apart from sampling
        ({"stop": "x", "seed": 1, "n": 2}, False),
        ({"repetition_penalty": 1.1, "temperature": 0}, True),
        ({"bad_words": ["x"]}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_who_needs_the_variant_with_processors(wish: dict, needs: bool) -> None:
    assert SamplingParams(**wish).needs_processors is needs
