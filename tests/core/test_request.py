"""Requests: what a prompt may be, what ends a request, and its sampling seed."""

import numpy as np
import pytest

from jaxvllm.core import Request
from jaxvllm.core.request import mix_seed, splitmix64
from jaxvllm.sampling_params import SamplingParams
from tests.core.helpers import Loop, make_request, make_scheduler


def create(prompt, **params) -> Request:
    return Request.create("r", 3, prompt, SamplingParams(**params), model_eos=(90, 91), engine_seed=5)


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8)])
def test_a_prompt_is_any_integer_sequence(prompt):
    request = create(prompt)
    assert request.prompt_token_ids.dtype == np.int32
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (request.num_prompt, request.num_known, request.num_tokens, request.num_computed) == (3, 3, 3, 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        (np.zeros(0, np.int32), "is empty"),
        ("text", "is str"),
        (b"text", "is bytes"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([[1, 2], [3]], "not a sequence of token ids"),
        (7, r"shape \(\)"),
        (None, r"shape \(\)"),
        ([1.0, 2.0], "float64"),
        ([True, False], "bool"),
        (["a", "b"], "token ids are integers"),
        ([1, None], "object"),
        ([1, -1], "token id -1"),
        ([2**31], "token id 2147483648"),
        ([2**64], "object"),
    ],
)
def test_a_bad_prompt_is_named(prompt, message):
    with pytest.raises(ValueError, match=message) as error:
        create(prompt)
    assert "request 'r'" in str(error.value)


def test_the_prompt_is_a_copy():
    mine = np.array([1, 2, 3], np.int32)
    request = create(mine)
    mine[:] = 9
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 5


def test_what_ends_a_request():
    assert create([1]).eos_token_ids == {90, 91}
    assert create([1], ignore_eos=True).eos_token_ids == set()
    request = create([1], stop_token_ids=(7, 90))
    assert (request.eos_token_ids, request.user_stop_ids) == ({90, 91, 7}, {7})
    request = create([1], stop_token_ids=(7, 90), ignore_eos=True)
    assert (request.eos_token_ids, request.user_stop_ids) == ({7, 90}, {7, 90})


@pytest.mark.parametrize(
    ("params", "sampled", "reason", "stop_reason", "outputs"),
    [
        ({}, [1, 90], "stop", None, [1, 90]),
        ({"stop_token_ids": (8,)}, [1, 8], "stop", 8, [1, 8]),
        ({"stop_token_ids": (90,)}, [90], "stop", None, [90]),
        ({"stop_token_ids": (90,), "ignore_eos": True}, [90], "stop", 90, [90]),
        ({"ignore_eos": True, "max_tokens": 3}, [90, 91, 5], "length", None, [90, 91, 5]),
        ({"max_tokens": 2}, [1, 90], "stop", None, [1, 90]),  # both at once: the end token wins
        ({"max_tokens": 1}, [1], "length", None, [1]),
        # A neighbour's stop tokens are nothing to this one.
        ({"max_tokens": 2}, [8, 77], "length", None, [8, 77]),
    ],
)
def test_finish_reasons(params, sampled, reason, stop_reason, outputs):
    scheduler = make_scheduler()
    neighbour = make_request(1, [4, 4], max_tokens=9, stop_token_ids=(8, 77, 2**40))
    request = create([1, 2, 3], **params)
    scheduler.add(request)
    scheduler.add(neighbour)
    tokens = iter(sampled)
    loop = Loop(scheduler, lambda step: np.array([next(tokens), *[0] * (len(step.requests) - 1)]))
    while request.finish_reason is None:
        loop.step()
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == outputs
    assert neighbour.finish_reason is None


def test_outputs_since_is_what_a_stream_has_not_seen():
    scheduler = make_scheduler()
    request = make_request(0, [1, 2, 3], max_tokens=4)
    scheduler.add(request)
    loop = Loop(scheduler)
    seen: list[int] = []
    while scheduler.has_unfinished():
        loop.step()
        new = request.outputs_since(len(seen))
        assert len(new) == 1
        seen += new
    assert seen == request.output_token_ids == [3, 4, 5, 6]


def test_splitmix64_gives_the_published_sequence():
    # The first outputs of SplitMix64 from state 1234567, as printed for the C reference implementation.
    golden = 0x9E3779B97F4A7C15
    assert [splitmix64(1234567 + i * golden) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_seed_vectors():
    """These are part of the reproducibility promise: a change here changes everybody's unseeded samples."""
    assert [mix_seed(0, index) for index in range(3)] == [
        12035550249420947055,
        12935080325729570654,
        7141179953334974231,
    ]
    assert mix_seed(2**64 - 1, 10**6) == 8506374182050514795


def test_seeds_are_all_different_and_well_mixed():
    seeds = [mix_seed(engine, index) for engine in range(20) for index in range(500)]
    assert len(set(seeds)) == len(seeds)
    bits = np.unpackbits(np.array(seeds, np.uint64).view(np.uint8)).reshape(len(seeds), 64)
    assert np.all(abs(bits.mean(axis=0) - 0.5) < 0.03)  # 6 sigma
    assert create([1]).seed == mix_seed(5, 3)
    assert create([1], seed=12).seed == 12
    assert create([1], seed=2**64 - 1).seed == 2**64 - 1
