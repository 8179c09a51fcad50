"""Deltas are never taken back, and joined they are the full decode (`tokenizers`' own is the oracle)."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jaxvllm.detokenizer import REPLACEMENT, WindowDetokenizer, byte_alphabet
from jaxvllm.inputs import Prompt
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tracked import Tracked
from tests.api import tokenizers_for_tests as make

BYTE_LEVEL = Tokenizer(make.byte_level(), Path())
BYTE_FALLBACK = Tokenizer(make.byte_fallback(), Path())
WORDS = Tokenizer(make.words(), Path())
ALL = [
    pytest.param(BYTE_LEVEL, id="byte_level"),
    pytest.param(BYTE_FALLBACK, id="byte_fallback"),
    pytest.param(WORDS, id="words"),
]
FAMILY_EMOJI = "👩‍👩‍👧"


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


def test_alphabet_is_that_of_tokenizers() -> None:
    from tokenizers import pre_tokenizers

    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    ascii_and_space = {character: byte for character, byte in byte_alphabet().items() if byte < 128}
    for character, byte in ascii_and_space.items():
        assert decoders.ByteLevel().decode([character]) == chr(byte)


@pytest.mark.parametrize("tokenizer", ALL)
def test_every_id_and_ids_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    ids = list(range(tokenizer.vocab_size + 5))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", ALL[:2])
@pytest.mark.parametrize("text", ["👍", FAMILY_EMOJI, "naïve 你好 👍 the", "a\ufffdb", "\ufffd", ""])
def test_text_arrives_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == text == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts)


def test_an_emoji_of_four_tokens_comes_with_its_last() -> None:
    ids = BYTE_LEVEL.encode("👍")
    assert len(ids) == 4
    assert deltas(BYTE_LEVEL, ids) == ["", "", "", "👍", ""]


def test_an_emoji_of_four_tokens_comes_with_its_last_from_any_other_decoder() -> None:
    """A decoder that is neither plain byte-level nor has byte fallback: only the text says that more must come."""
    backend = make.byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, Path())
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    ids = tokenizer.encode("a👍b")
    assert len(ids) == 6
    assert deltas(tokenizer, ids) == ["a", "", "", "", "👍", "b", ""]


@pytest.mark.parametrize("tokenizer", ALL[:2])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat 👍 sat")
    whole = tokenizer.decode(ids)
    start = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith(REPLACEMENT))
    for inside in range(start, start + 3):
        assert "".join(deltas(tokenizer, ids[inside:], ids[:inside])) == whole[whole.index("👍") :]


def test_the_text_of_a_request_goes_on_where_its_prompt_ended() -> None:
    """Case 19, as an engine asks for it: the prompt ends inside a character that the first outputs complete."""
    ids = BYTE_LEVEL.encode("the 👍 cat")
    inside = next(n for n in range(len(ids)) if BYTE_LEVEL.decode(ids[:n]).endswith(REPLACEMENT))
    prompt = Prompt(None, np.array(ids[:inside], np.int32))
    text = Tracked("0", prompt, SamplingParams(), BYTE_LEVEL, online=True).new_text()
    assert text is not None
    shown = []
    for token in ids[inside:]:
        text.push([token])
        shown.append(text.shown)
    assert shown[-1] == "👍 cat"
    assert not any(REPLACEMENT in one for one in shown)


@pytest.mark.parametrize("tokenizer", ALL)
def test_an_unfinished_character_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 👍")[:-1]
    detokenizer = tokenizer.detokenizer()
    text = detokenizer.push(ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("tokenizer", ALL)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_joined_deltas_equal_the_full_decode_of_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    for n in range(len(ids)):  # what was streamed is a prefix of everything that any longer output shows
        assert tokenizer.decode(ids).startswith("".join(parts[: n + 1]))


@pytest.mark.parametrize("tokenizer", ALL[:2])
@given(text=st.text(max_size=12), split=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_output_continues_any_prompt(tokenizer: Tokenizer, text: str, split: int) -> None:
    ids = tokenizer.encode(f"the {text}. sat")
    split = min(split, len(ids))
    whole = tokenizer.decode(ids)
    joined = "".join(deltas(tokenizer, ids[split:], ids[:split]))
    settled = whole.removesuffix(joined)
    assert settled + joined == whole
    # settled is the prompt's text, less an unfinished character of up to three bytes (or byte tokens)
    ends = [tokenizer.decode(ids[:n]) for n in range(max(split - 3, 0), split + 1)]
    assert any(settled + REPLACEMENT * count == end for end in ends for count in range(4))


def test_special_tokens_have_no_text_and_added_ones_do() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>the<think>cat<a b><|im_end|>", add_special_tokens=False)
    assert "".join(deltas(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids) == "the<think>cat<a b>"


def test_a_leading_space_survives_special_tokens_between() -> None:
    end = BYTE_FALLBACK._backend.token_to_id("</s>")
    ids = BYTE_FALLBACK.encode("the cat")
    ids = [*ids[:1], *[end] * 8, *ids[1:]]
    assert "".join(deltas(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids) == "the cat"
