"""Buckets: the few padded shapes for which a step is compiled.

Owns the choice of a shape for a step. Must not know what is compiled for it. After warm-up nothing may
compile, so every step must fit a bucket of the table; a step padded to twice its size costs up to twice its
time, so sizes are close where steps are frequent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxvllm.core.step import ScheduledStep

QUERY_TILE = 64
"""Query tokens of one attention work item in a ragged step; see `plan`."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for `num_tokens` tokens of `num_seqs` sequences. "decode": one token each, so both are equal."""

    kind: Literal["decode", "ragged"]
    num_tokens: int
    num_seqs: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_seqs <= self.num_tokens:
            raise ValueError(f"num_seqs={self.num_seqs} must be in [1, num_tokens={self.num_tokens}]")
        if self.kind == "decode" and self.num_seqs != self.num_tokens:
            raise ValueError(f"a decode bucket has num_tokens={self.num_tokens} = num_seqs={self.num_seqs}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.num_tokens}"


class BucketTable:
    """All buckets of an engine: decode sizes in sequences, token sizes for steps that carry prompt tokens.

    A ragged bucket for T tokens holds min(T, max_num_seqs) sequences: more can't be in a step of T tokens.
    """

    def __init__(self, decode_sizes: Sequence[int], token_sizes: Sequence[int], max_num_seqs: int) -> None:
        """Sizes in any order. ValueError if one is below 1, or a full decode step would have no bucket."""
        if _checked("decode_sizes", decode_sizes)[-1] != max_num_seqs:
            raise ValueError(f"decode_sizes={list(decode_sizes)} must end at max_num_seqs={max_num_seqs}, a full step")
        self._decode = [Bucket("decode", size, size) for size in _checked("decode_sizes", decode_sizes)]
        token_sizes = _checked("token_sizes", token_sizes)
        self._ragged = [Bucket("ragged", size, min(size, max_num_seqs)) for size in token_sizes]

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Every bucket, decode first, each kind from small to large."""
        return (*self._decode, *self._ragged)

    @property
    def largest(self) -> tuple[Bucket, ...]:
        """The largest of each kind."""
        return self._decode[-1], self._ragged[-1]

    def pick(self, step: ScheduledStep) -> Bucket:
        """The smallest bucket that `step` fits. ValueError if none does."""
        if step.kind == "decode":
            return self.fit("decode", len(step.requests))
        return self.fit("ragged", step.num_query_tokens)

    def fit(self, kind: Literal["decode", "ragged"], num_tokens: int) -> Bucket:
        """The smallest bucket of this kind for `num_tokens` tokens. ValueError if none is large enough."""
        buckets = self._decode if kind == "decode" else self._ragged
        at = bisect_left(buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        if at == len(buckets):
            raise ValueError(f"a {kind} step of {num_tokens} tokens: the largest bucket is {buckets[-1]}")
        return buckets[at]


def default_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two, from 64 on also halfway between, then exactly `max_num_seqs`: 1, 2, 4, ..., 64, 96, 128, 192, 256.

    Small steps are bound by the weights that they read, whatever their padding; large ones by work that grows with it.
    """
    powers = _powers(1, max_num_seqs)
    halfway = [size * 3 // 2 for size in powers if size >= 64 and size * 3 // 2 < max_num_seqs]
    return tuple(sorted({*powers, *halfway}))


def default_token_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """16, 64, powers of two from 256, then exactly `max_num_batched_tokens`: 16, 64, 256, 512, ..., 8192.

    Coarse where a step is bound by the weights it reads and padding is nearly free, finer where it is bound
    by work.
    """
    small = [size for size in (16, 64) if size < max_num_batched_tokens]
    return (*small, *_powers(256, max_num_batched_tokens))


def _powers(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... below `last`, then `last`."""
    if last < 1:
        raise ValueError(f"size {last} must be at least 1")
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _checked(name: str, sizes: Sequence[int]) -> list[int]:
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"{name}={list(sizes)} must be a non-empty list of integers, each at least 1")
    return sorted(set(sizes))
