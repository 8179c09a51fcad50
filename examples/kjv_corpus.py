"""The text of prepare_kjv.py as documents of token ids: chapters, their split, and what a byte costs.

Shared by train_tiny.py and kneser_ney.py, so that both read the same tokens, the same split and the same
denominator. No jax here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SPLIT_PERIOD, VALIDATION_REMAINDER, HELD_OUT_REMAINDER = 30, 10, 25


@dataclass(frozen=True, slots=True)
class Split:
    """Whole chapters. Parameters are fitted on train; validation picks the checkpoint; held_out is only
    reported."""

    train: list[str]
    validation: list[str]
    held_out: list[str]


def load_chapters(path: str | Path) -> list[str]:
    """Reads prepare_kjv.py's file: chapters "heading\\nverse\\n...verse\\n", an empty line between two of
    them."""
    text = Path(path).read_text(encoding="utf-8")
    chapters = [chapter.rstrip("\n") + "\n" for chapter in text.split("\n\n") if chapter.strip()]
    if not chapters:
        raise ValueError(f"{path} holds no chapter; make it with examples/prepare_kjv.py")
    return chapters


def split_chapters(chapters: Sequence[str]) -> Split:
    """By the chapter's number in the file, from 0: n % 30 == 10 is validation, n % 30 == 25 is held out."""
    parts: dict[str, list[str]] = {"train": [], "validation": [], "held_out": []}
    for number, chapter in enumerate(chapters):
        remainder = number % SPLIT_PERIOD
        name = {VALIDATION_REMAINDER: "validation", HELD_OUT_REMAINDER: "held_out"}.get(remainder, "train")
        parts[name].append(chapter)
    return Split(**parts)


@dataclass(frozen=True, slots=True)
class Documents:
    """Chapters as token ids. A document is [end_of_text, tokens..., end_of_text]; its first id is never
    predicted."""

    token_ids: list[np.ndarray]  # int32 each
    num_bytes: int  # UTF-8 bytes of the text, the end_of_text ids not counted

    @property
    def num_predicted(self) -> int:
        """Tokens that a model is scored on: all but each document's first."""
        return sum(len(ids) - 1 for ids in self.token_ids)

    def bits_per_byte(self, total_nats: float) -> float:
        """Turns the summed negative log-likelihood (nats) of all predicted tokens into bits per byte of
        text."""
        return total_nats / (math.log(2.0) * self.num_bytes)


def encode_documents(tokenizer: Tokenizer, chapters: Sequence[str]) -> Documents:
    """Raises ValueError if the tokenizer lacks <|endoftext|> or doesn't give the text back."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT!r}; use the one that train_tiny.py writes")
    documents = []
    for chapter, encoding in zip(chapters, tokenizer.encode_batch(list(chapters)), strict=True):
        if tokenizer.decode(encoding.ids) != chapter:
            raise ValueError(f"the tokenizer loses text in the chapter that begins {chapter[:40]!r}")
        documents.append(np.array([end, *encoding.ids, end], np.int32))
    return Documents(documents, sum(len(chapter.encode()) for chapter in chapters))
