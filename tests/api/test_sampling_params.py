"""SamplingParams and outputs: vLLM's meanings, and errors that name field, value and limit."""

import dataclasses
import math

import numpy as np
import pytest

from jaxvllm import CompletionOutput, RequestOutput, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 16, False)
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
        ("seed", 1.0),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", "x"),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    shown = str(value[-1] if isinstance(value, list) else value).strip("'")
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert shown in str(caught.value)


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
