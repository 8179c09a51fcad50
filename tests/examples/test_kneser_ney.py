"""The baseline against a second implementation, written from the definition without tables, and its sums."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from kjv_corpus import Documents
from kneser_ney import KneserNey, bits_per_byte

VOCAB = 7  # id 0 begins and ends a document; id 6 never occurs


def toy_documents(seed: int, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[0, *rng.choices([1, 2, 3, 4, 5], [8, 4, 2, 1, 1], k=rng.randint(1, 30)), 0] for _ in range(count)]


class ByDefinition:
    """Chen and Goodman's formulas, every count made anew by walking over all n-grams of the text."""

    def __init__(self, documents: Sequence[Sequence[int]], order: int) -> None:
        self.order = order
        self.occurrences = [
            tuple(padded[i : i + order])
            for document in documents
            for padded in [[document[0]] * (order - 2) + list(document) if order > 1 else list(document[1:])]
            for i in range(len(padded) - order + 1)
        ]

    def counts(self, n: int) -> dict[tuple[int, ...], int]:
        """Occurrences at the highest order; below it, the number of different tokens seen before the
        n-gram."""
        if n == self.order:
            return Counter(self.occurrences)
        grams: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for gram in self.occurrences:
            tail = gram[self.order - n - 1 :]
            grams.setdefault(tail[1:], set()).add(tail)
        return {gram: len(before) for gram, before in grams.items()}

    def probability(self, token: int, context: tuple[int, ...], n: int) -> float:
        if n == 0:
            return 1 / VOCAB
        context = context[len(context) - (n - 1) :]
        counts = self.counts(n)
        here = {gram: c for gram, c in counts.items() if gram[:-1] == context}
        below = self.probability(token, context[1:], n - 1)
        if not here:
            return below
        n1, n2, n3, n4 = (sum(c == j for c in counts.values()) for j in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        discount = [y, y, y]
        if n1 and n2 and n3 and n4:
            closed = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
            discount = closed if all(0 < d <= j for j, d in enumerate(closed, 1)) else discount
        total = sum(here.values())
        kept = max(here.get((*context, token), 0) - discount[min(here.get((*context, token), 0), 3) - 1], 0)
        given_away = sum(discount[min(c, 3) - 1] for c in here.values())
        return kept / total * ((*context, token) in here) + given_away / total * below


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_probabilities_equal_the_definition(order: int, seed: int) -> None:
    documents = toy_documents(seed)
    fast, slow = KneserNey(documents, VOCAB, order), ByDefinition(documents, order)
    contexts = [(0, 0), (0, 1), (1, 2), (3, 3), (5, 4), (6, 1), (1, 6), (6, 6)]
    for context in contexts:
        for token in range(VOCAB):
            want = slow.probability(token, context[len(context) - (order - 1) :], order)
            assert fast.probability(token, context) == pytest.approx(want, rel=1e-12), (context, token)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_sum_to_one_in_seen_and_unseen_contexts(order: int) -> None:
    for seed, count in ((0, 12), (1, 1), (2, 200)):
        model = KneserNey(toy_documents(seed, count), VOCAB, order)
        for a in range(VOCAB):
            for b in range(VOCAB):
                probabilities = [model.probability(token, (b, a, a, b)) for token in range(VOCAB)]
                assert sum(probabilities) == pytest.approx(1, abs=1e-12)
                assert min(probabilities) > 0


def test_one_big_sample_uses_three_discounts() -> None:
    rng = random.Random(3)
    documents = [[0, *(min(int(rng.expovariate(0.02)), 400) + 1 for _ in range(2000)), 0]]
    first, second, third = KneserNey(documents, 402, 2).discounts[1]
    assert 0 < first < second < third <= 3


def test_nats_count_every_token_but_the_first() -> None:
    documents = toy_documents(0)
    model = KneserNey(documents, VOCAB)
    document = [0, 3, 1, 0]
    want = [model.probability(3, (0, 0)), model.probability(1, (0, 3)), model.probability(0, (3, 1))]
    assert model.nats(document) == pytest.approx(-sum(map(math.log, want)))


def test_bits_per_byte_of_a_uniform_model() -> None:
    train = Documents([np.array([0, 0], np.int32)], 1)
    test = Documents([np.array([0, 1, 2, 3, 0], np.int32)], 5)
    # One token seen, once: half of its mass is discounted and spread evenly; order 1 has no context.
    spread = 0.5 / 4
    want = -(3 * math.log2(spread) + math.log2(0.5 + spread)) / 5
    assert bits_per_byte(train, test, vocab_size=4, order=1) == pytest.approx(want)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="order=0"):
        KneserNey([[0, 1]], VOCAB, 0)
