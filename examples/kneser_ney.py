"""The baseline that the tiny model must beat: an interpolated modified Kneser-Ney model over the same tokens
and split.

    python examples/kneser_ney.py --text .corpus/kjv.txt --tokenizer examples/tiny-kjv/tokenizer.json

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), sections 4.1.6
and 4.3. The highest order uses how often an n-gram occurs; every lower order uses in how many different left
contexts it occurs (continuation counts). With c the count in use, n_j how many n-grams have c = j, Y = n_1 /
(n_1 + 2 n_2):

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h .) + gamma(h) p(w | h without its first token)
    D(1) = 1 - 2Y n_2/n_1    D(2) = 2 - 3Y n_3/n_2    D(3 and more) = 3 - 4Y n_4/n_3
    gamma(h) = (sum over w with c(h w) > 0 of D(c(h w))) / c(h .)

The order below unigrams is uniform over the vocabulary; a context never seen passes everything down. Each p(.
| h) sums to 1 over the vocabulary, which tests/examples checks, beside a brute-force count.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from kjv_corpus import Documents, encode_documents, load_chapters, split_chapters
from tokenizers import Tokenizer

Context = tuple[int, ...]
Tokens = Sequence[int] | np.ndarray  # whole numbers, one axis


class KneserNey:
    """Interpolated modified Kneser-Ney of any order over integer tokens 0 .. vocab_size - 1."""

    def __init__(self, documents: Iterable[Tokens], vocab_size: int, order: int = 3) -> None:
        """Documents begin with a token that is context only (end_of_text); it also fills the context to its
        left."""
        if order < 1 or vocab_size < 1:
            raise ValueError(f"order={order} and vocab_size={vocab_size} must be at least 1")
        self.order, self.vocab_size = order, vocab_size
        highest: Counter[Context] = Counter()
        for document in documents:
            padded = self._pad(document)
            highest.update(tuple(padded[i - order + 1 : i + 1]) for i in range(order - 1, len(padded)))
        # counts[n - 1][context of n - 1 tokens][token]; from the highest order down, each distinct longer
        # n-gram adds 1 to what remains of it without its first token.
        self.counts: list[dict[Context, dict[int, int]]] = [{}] * order
        self.discounts: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * order
        grams = highest
        for n in range(order, 0, -1):
            table: defaultdict[Context, dict[int, int]] = defaultdict(dict)
            for gram, count in grams.items():
                table[gram[:-1]][gram[-1]] = count
            self.counts[n - 1] = dict(table)
            self.discounts[n - 1] = _discounts(grams.values())
            grams = Counter(gram[1:] for gram in grams)
        self._mass = [
            {h: self._context_mass(n, row) for h, row in table.items()} for n, table in enumerate(self.counts)
        ]

    def _pad(self, document: Tokens) -> list[int]:
        """So that position order - 1 is the first predicted token, document[1]."""
        tokens = [int(token) for token in document]
        return tokens[:1] * (self.order - 2) + tokens if self.order >= 2 else tokens[1:]

    def _context_mass(self, n: int, row: dict[int, int]) -> tuple[float, float]:
        """(c(h .), gamma(h)) of one context."""
        total = float(sum(row.values()))
        return total, sum(self.discounts[n][min(count, 3) - 1] for count in row.values()) / total

    def probability(self, token: int, context: Sequence[int]) -> float:
        """p(token | context); only the last order - 1 tokens of the context count."""
        history = tuple(context)[-(self.order - 1) :] if self.order > 1 else ()
        p = 1.0 / self.vocab_size
        for n in range(len(history) + 1):
            suffix = history[len(history) - n :]
            mass = self._mass[n].get(suffix)
            if mass is None:  # a longer context that ends in this one was never seen either
                break
            total, gamma = mass
            count = self.counts[n][suffix].get(token, 0)
            kept = count - self.discounts[n][min(count, 3) - 1] if count else 0.0
            p = kept / total + gamma * p
        return p

    def nats(self, document: Tokens) -> float:
        """Negative log-likelihood (nats) of document[1:]."""
        padded = self._pad(document)
        first = self.order - 1
        return -sum(math.log(self.probability(padded[i], padded[i - first : i])) for i in range(first, len(padded)))


def _discounts(counts: Iterable[int]) -> tuple[float, float, float]:
    """D(1), D(2), D(3+) by Chen and Goodman's closed form; on data too small for it, one absolute
    discount."""
    have = Counter(counts)
    n1, n2, n3, n4 = (have[j] for j in (1, 2, 3, 4))
    if not n1 or not n2:
        return (0.5, 0.5, 0.5)
    y = n1 / (n1 + 2.0 * n2)
    if n3 and n4:
        closed = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if all(0.0 < discount <= j for j, discount in enumerate(closed, 1)):
            return closed
    return (y, y, y)


def bits_per_byte(train: Documents, test: Documents, vocab_size: int, order: int = 3) -> float:
    """Fits on train, scores every predicted token of test."""
    model = KneserNey(train.token_ids, vocab_size, order)
    return test.bits_per_byte(sum(model.nats(ids) for ids in test.token_ids))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="what prepare_kjv.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the tiny model")
    parser.add_argument("--order", type=int, default=3, help="3 = trigram")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    split = split_chapters(load_chapters(args.text))
    train, held_out = (encode_documents(tokenizer, part) for part in (split.train, split.held_out))
    result = {
        "model": "interpolated modified Kneser-Ney",
        "order": args.order,
        "train_tokens": train.num_predicted,
        "held_out_tokens": held_out.num_predicted,
        "held_out_bytes": held_out.num_bytes,
        "held_out_bits_per_byte": round(bits_per_byte(train, held_out, tokenizer.get_vocab_size(), args.order), 4),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
