"""Stop strings and what is shown of a text that may still be cut (case 18), against a search character by character."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.stop_strings import CompletionText
from tests.core.helpers import PROPERTY


class Pieces:
    """A decoder whose tokens are texts; it may hold some back until the end."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def flush(self) -> str:
        return self.rest


def run(pieces: Sequence[str], stop: Sequence[str], include: bool) -> tuple[str, str | None, list[str]]:
    """(the final text, the stop string, what was shown after each token)."""
    text = CompletionText(Pieces(pieces), stop, include_stop=include)
    shown = []
    for token in range(len(pieces)):
        found = text.push([token])
        shown.append(text.shown)
        if found is not None:
            break
    text.flush()
    return text.shown, text.stop_string, shown


def by_characters(whole: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition: the text ends as soon as it ends in a stop string; the first of the list if in several."""
    for end in range(len(whole) + 1):
        for one in stop:
            if whole[:end].endswith(one):
                return whole[: end if include else end - len(one)], one
    return whole, None


@pytest.mark.parametrize("include", [False, True])
def test_across_token_borders(include: bool) -> None:
    text, stop, shown = run(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], include)
    assert (text, stop) == (("ABCDEFGHIJ" if include else "ABC"), "DEFGHIJ")
    assert shown[:4] == (["ABC", "ABCDEF", "ABCDEFG", "ABCDEFGHI"] if include else ["ABC"] * 4)


def test_a_beginning_that_comes_to_nothing_is_shown_later_and_at_the_end() -> None:
    assert run(["ab", "c", "x"], ["abcd"], False)[2] == ["", "", "abcx"]
    assert run(["ab", "c"], ["abcd"], False)[0] == "abc"  # flushed


def test_a_stop_string_inside_the_beginning_of_another() -> None:
    assert run(["xab", "cy"], ["abcd", "bc"], False)[:2] == ("xa", "bc")
    assert run(["aab"], ["ab"], False)[:2] == ("a", "ab")
    assert run(["abab", "c"], ["ababc", "abc"], False)[:2] == ("", "ababc")


def test_the_beginning_of_any_of_them_is_held_back() -> None:
    for stop in (["yz", "abcd"], ["abcd", "yz"]):
        assert run(["xa", "b", "c", "d"], stop, False) == ("x", "abcd", ["x", "x", "x", "x"])
        assert run(["xa", "b", "y", "b"], stop, False) == ("xabyb", None, ["x", "x", "xab", "xabyb"])


def test_texts_before_min_tokens_do_not_end_it() -> None:
    text = CompletionText(Pieces(["a", "b", "ab"]), ["ab"])
    assert text.push([0, 1], may_stop=False) is None
    assert text.shown == "ab"
    assert text.push([2]) == "ab" and text.shown == "ab"
    assert text.push([0]) == "ab" and text.text == "ab"  # nothing is taken any more


def test_what_the_decoder_holds_comes_out_once() -> None:
    text = CompletionText(Pieces(["a"], rest="\N{REPLACEMENT CHARACTER}"))
    text.push([0])
    text.flush()
    text.flush()
    assert text.shown == "a\N{REPLACEMENT CHARACTER}"


@PROPERTY
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
       st.booleans())  # fmt: skip
def test_any_cut_into_tokens_gives_the_definition(pieces: list[str], stop: list[str], include: bool) -> None:
    whole = "".join(pieces)
    text, found, shown = run(pieces, stop, include)
    assert (text, found) == by_characters(whole, stop, include)
    for before, after in itertools.pairwise([*shown, text]):
        assert after.startswith(before)  # nothing that was shown is taken back
