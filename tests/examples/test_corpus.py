"""Preparing the text, its split, and what is counted in it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kjv_corpus import Documents, encode_documents, load_chapters, split_chapters
from prepare_kjv import BOOKS, chapters_from_verses
from tiny_export import train_tokenizer
from tiny_training import Recipe, epoch_windows, evaluation_windows

RAW = [
    "Ge1:1 In the beginning  God created.",
    "Ge1:2 And the earth",
    "Ge2:1 Thus the heavens",
    "1Jn1:1 That which was",
]


def test_verses_become_chapters() -> None:
    assert chapters_from_verses(RAW) == [
        "Genesis 1\nIn the beginning God created.\nAnd the earth\n",
        "Genesis 2\nThus the heavens\n",
        "1 John 1\nThat which was\n",
    ]
    assert len(BOOKS) == 66
    with pytest.raises(ValueError, match=r"line 2 .*'Foo1:1 x'"):
        chapters_from_verses([RAW[0], "Foo1:1 x"])


def test_chapters_survive_the_file(tmp_path: Path) -> None:
    chapters = chapters_from_verses(RAW)
    (tmp_path / "text").write_text("\n".join(chapters))
    assert load_chapters(tmp_path / "text") == chapters
    (tmp_path / "text").write_text("\n")
    with pytest.raises(ValueError, match="prepare_kjv"):
        load_chapters(tmp_path / "text")


def test_the_split_is_by_number_and_complete() -> None:
    names = [f"chapter {number}\n" for number in range(70)]
    split = split_chapters(names)
    assert split.validation == ["chapter 10\n", "chapter 40\n"]
    assert split.held_out == ["chapter 25\n", "chapter 55\n"]
    assert len(split.train) == 66 and not set(split.train) & {*split.validation, *split.held_out}


def test_encoding_loses_nothing_and_counts_bytes() -> None:
    chapters = ["Alpha 1\nthe naïve word was the word\n", "Beta 2\nthe word\n"]
    tokenizer = train_tokenizer(chapters, 270)
    documents = encode_documents(tokenizer, chapters)
    assert documents.num_bytes == sum(len(chapter.encode()) for chapter in chapters)
    for ids, chapter in zip(documents.token_ids, chapters, strict=True):
        assert ids[0] == ids[-1] == tokenizer.token_to_id("<|endoftext|>") == 0
        assert tokenizer.decode(ids[1:-1].tolist()) == chapter
        assert len(ids) < len(chapter.encode())  # merges were learned
    assert documents.num_predicted == sum(len(ids) - 1 for ids in documents.token_ids)
    assert documents.bits_per_byte(np.log(2) * documents.num_bytes) == pytest.approx(1)


@pytest.mark.parametrize("context", [2, 8, 9])
def test_evaluation_counts_each_prediction_once_with_enough_context(context: int) -> None:
    documents = [np.arange(100 * i, 100 * i + length, dtype=np.int32) for i, length in enumerate((2, 9, 10, 37), 1)]
    windows, counted = evaluation_windows(documents, context)
    predicted = [int(token) for window, count in zip(windows, counted, strict=True) for token in window[1:][count]]
    assert predicted == [int(token) for ids in documents for token in ids[1:]]
    for window, count in zip(windows, counted, strict=True):
        if window[0] % 100:  # not the document's first window
            assert not count[: context // 2 - 1].any()


def test_an_epoch_is_a_cut_of_all_documents() -> None:
    rng = np.random.default_rng(0)
    documents = [np.array([0, *rng.integers(1, 50, 40), 0], np.int32) for _ in range(10)]
    recipe = Recipe(context=16, batch=4)
    windows = epoch_windows(documents, recipe, np.random.default_rng(1))
    assert windows.shape == (6, 4, 17)  # 410 tokens, 6 steps of 64 predictions
    other = epoch_windows(documents, recipe, np.random.default_rng(2))
    assert not np.array_equal(windows, other)
    follows = {(int(a), int(b)) for ids in documents for a, b in pairwise(ids)}
    pairs = {(int(a), int(b)) for window in windows.reshape(-1, 17) for a, b in pairwise(window)}
    assert pairs <= follows
    with pytest.raises(ValueError, match="less than one step"):
        epoch_windows(documents, Recipe(context=512, batch=4), rng)


def test_documents_hold_what_they_are_given() -> None:
    assert Documents([np.array([0, 5, 0], np.int32)], 3).num_predicted == 2
