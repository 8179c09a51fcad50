"""Buckets: every step has one, the smallest that fits."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core import Bucket, BucketTable, default_decode_sizes, default_token_sizes
from tests.core.helpers import PROPERTY, Loop, make_request, make_scheduler


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (100, (1, 2, 4, 8, 16, 32, 64, 96, 100)),
        (256, (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)),
    ],
)
def test_default_decode_sizes(max_num_seqs, sizes):
    assert default_decode_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (1, (1,)),
        (16, (16,)),
        (17, (16, 17)),
        (64, (16, 64)),
        (256, (16, 64, 256)),
        (1000, (16, 64, 256, 512, 1000)),
        (8192, (16, 64, 256, 512, 1024, 2048, 4096, 8192)),
        (16384, (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    ],
)
def test_default_token_sizes(budget, sizes):
    assert default_token_sizes(budget) == sizes


def test_the_table_lists_every_bucket():
    table = BucketTable([4, 1, 4], [16, 2], max_num_seqs=4)
    assert table.all == (
        Bucket("decode", 1, 1),
        Bucket("decode", 4, 4),
        Bucket("ragged", 2, 2),  # two tokens are of at most two sequences
        Bucket("ragged", 16, 4),
    )
    assert [str(bucket) for bucket in table.all] == ["decode-1", "decode-4", "ragged-2", "ragged-16"]


@PROPERTY
@given(st.integers(1, 300), st.integers(1, 9000), st.data())
def test_the_smallest_fitting_bucket(max_num_seqs, budget, data):
    table = BucketTable(default_decode_sizes(max_num_seqs), default_token_sizes(budget), max_num_seqs)
    kinds: tuple[tuple[Literal["decode", "ragged"], int], ...] = (
        ("decode", max_num_seqs),
        ("ragged", budget),
    )
    for kind, most in kinds:
        size = data.draw(st.integers(1, most))
        bucket = table.fit(kind, size)
        fitting = [b for b in table.all if b.kind == kind and b.num_tokens >= size]
        assert bucket == min(fitting, key=lambda b: b.num_tokens)
        assert bucket.num_seqs >= min(size, max_num_seqs)
        with pytest.raises(ValueError, match=f"a {kind} step of {most + 1} tokens"):
            table.fit(kind, most + 1)


def test_pick_goes_by_the_kind_of_the_step():
    table = BucketTable([1, 2, 8], [4, 16, 64], max_num_seqs=8)
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add(make_request(i, [1, 2], max_tokens=3))
    loop = Loop(scheduler)
    loop.drain()
    assert [table.pick(step) for step in loop.steps] == [
        Bucket("ragged", 16, 8),
        Bucket("decode", 8, 8),
        Bucket("decode", 8, 8),
    ]


@pytest.mark.parametrize(
    ("decode", "token", "message"),
    [
        ([], [16], r"decode_sizes=\[\]"),
        ([1, 8], [], r"token_sizes=\[\]"),
        ([0, 8], [16], r"decode_sizes=\[0, 8\]"),
        ([1, 8], [16.0], r"token_sizes=\[16.0\]"),
        ([True, 8], [16], r"decode_sizes=\[True, 8\]"),
        ([1, 4], [16], r"decode_sizes=\[1, 4\] must end at max_num_seqs=8"),
        ([1, 16], [16], r"decode_sizes=\[1, 16\] must end at max_num_seqs=8"),
    ],
)
def test_bad_sizes_are_named(decode, token, message):
    with pytest.raises(ValueError, match=message):
        BucketTable(decode, token, max_num_seqs=8)


@pytest.mark.parametrize("sizes", [("decode", 4, 2), ("ragged", 2, 4), ("ragged", 4, 0)])
def test_impossible_buckets(sizes):
    with pytest.raises(ValueError, match="num_seqs"):
        Bucket(*sizes)
