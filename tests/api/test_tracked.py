"""What is handed out of a text as its tokens come (case 18): the parts, joined, and what may still be cut."""

from pathlib import Path

import numpy as np
import pytest

from jaxvllm.core.request import Request
from jaxvllm.inputs import Prompt
from jaxvllm.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Tracked
from tests.api import tokenizers_for_tests as make

TOKENIZER = Tokenizer(make.byte_level(), Path())
PROMPT = np.array(TOKENIZER.encode("the cat"), np.int32)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_the_beginning_of_a_stop_string_is_not_handed_out(kind: RequestOutputKind) -> None:
    """DEF, G, HI, J arrive one after the other; the text ends with what came before DEFGHIJ."""
    params = SamplingParams(stop=["never", "DEFGHIJ"], output_kind=kind)
    tracked = Tracked("0", Prompt(None, PROMPT), params, TOKENIZER, online=True)
    request = Request.create("0", 0, PROMPT, params, model_eos=(), engine_seed=0)
    completion = tracked.add(request)
    text = ""
    for piece in ("AB", "DEF", "G", "HI", "J"):
        new = np.array(TOKENIZER.encode(piece), np.int32)
        request.detached_output = np.concatenate([request.detached_output, new])
        stopped = completion.read()
        assert stopped == ("DEFGHIJ" if piece == "J" else None)
        output = tracked.output()
        tracked.mark_sent(output)
        part = output.outputs[0].text
        text = text + part if kind is RequestOutputKind.DELTA else part
        assert text == "AB"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    params = SamplingParams(stop=["DEFGHIJ"], output_kind=RequestOutputKind.DELTA)
    tracked = Tracked("0", Prompt(None, PROMPT), params, TOKENIZER, online=True)
    request = Request.create("0", 0, PROMPT, params, model_eos=(), engine_seed=0)
    tracked.add(request)
    parts = []
    for piece, reason in (("AB", None), ("DEF", None), ("G", "length")):
        new = np.array(TOKENIZER.encode(piece), np.int32)
        request.detached_output, request.finish_reason = np.concatenate([request.detached_output, new]), reason
        output = tracked.output()
        tracked.mark_sent(output)
        parts.append(output.outputs[0].text)
    assert parts == ["AB", "", "DEFG"]
