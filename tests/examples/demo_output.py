"""What `make demo` has to print, wherever it runs."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"


def check(printed: str) -> float:
    """The share of words that the text knows, of fifteen different continuations; the engine's counters are right."""
    lines = [line for line in printed.splitlines() if line.startswith(" " * 6)]
    texts = " ".join(lines).split("   ... ")[1:]
    assert len(texts) == len(set(texts)) == 15
    vocabulary = Tokenizer.from_file(str(TINY_KJV / "tokenizer.json")).get_vocab()
    whole_words = {token.removeprefix("Ġ").lower() for token in vocabulary if token.startswith("Ġ")}
    words = ["".join(filter(str.isalpha, word)).lower() for word in " ".join(texts).split() if word != "/"]
    share = sum(word in whole_words for word in words) / len(words)
    # of the held-out chapters' words 89 % are single tokens, of random tokens' words 68 %
    assert share > 0.8
    counters = dict(line.split() for line in printed.splitlines() if len(line.split()) == 2)
    assert int(counters["finished_requests"]) == 15 and int(counters["compiles_after_warmup"]) == 0
    assert int(counters["prefix_hit_tokens"]) > 0
    return share
