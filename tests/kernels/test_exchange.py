"""The exchange between shards, as far as a CPU can check it: the buffer, the protocol, the lowering (the sums run on
GPUs: tests/gpu/test_exchange.py)."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from jaxvllm.kernels import exchange_layout as layout
from jaxvllm.kernels.exchange_mosaic import all_reduce_add_rms_norm, best_of_shards
from tests.kernels.test_lowering import MOSAIC_CALL, cuda_text

STEP = (0, 1, 0, 1, 0, 1, 2)  # the turns of a step of three layers


def place(shards: int, capacity: int, turn: int, source: int, token: int) -> int:
    """Of a row in a buffer, counted in rows: the drawing in exchange_mosaic."""
    return (turn * shards + source) * capacity + token


@pytest.mark.parametrize(("shards", "capacity"), [(2, 5), (3, 1), (8, 4)])
def test_rows_and_pairs_have_places_of_their_own_and_fill_the_buffer(shards: int, capacity: int) -> None:
    row_bytes, max_seqs = 256, 7
    rows = {place(shards, capacity, *where) * row_bytes
            for where in itertools.product(range(layout.TURNS), range(shards), range(capacity))}  # fmt: skip
    first = layout.pairs_offset(shards, capacity, row_bytes)
    assert sorted(rows) == list(range(0, first, row_bytes))
    assert first + shards * max_seqs * layout.PAIR_BYTES == layout.buffer_bytes(shards, capacity, row_bytes, max_seqs)


@pytest.mark.parametrize(
    ("size", "itemsize", "values"),
    [(4096, 2, 8), (1024, 2, 8), (2560, 2, 4), (4096, 4, 4), (640, 2, None), (896, 2, None), (256, 2, 2),
     (128, 4, 1), (16384, 2, 8), (32768, 2, None)],
)  # fmt: skip
def test_threads_share_a_row_evenly_or_not_at_all(size: int, itemsize: int, values: int | None) -> None:
    assert layout.vector_size(size, itemsize) == values
    if values is not None:
        assert size % (layout.THREADS * values) == 0 and values * itemsize in (4, 8, 16)


class Shard:
    """One shard's programs of one token after the other, in the smallest steps: one word stands for a row."""

    def __init__(self, number: int, turns: tuple[int, ...], two_shots: bool, buffers: list[dict]) -> None:
        self.number, self.two_shots, self.buffers, self.sums = number, two_shots, buffers, []
        self.work = self.run(turns)
        next(self.work)

    def send(self, to: int, turn: int, source: int, word: int) -> None:
        assert self.buffers[to].get((turn, source)) is None, "a word that nobody has read yet was overwritten"
        self.buffers[to][turn, source] = word

    def receive(self, turn: int, source: int):
        while self.buffers[self.number].get((turn, source)) is None:
            yield False
        yield True
        word = self.buffers[self.number][turn, source]
        yield True
        self.buffers[self.number][turn, source] = None
        yield True
        return word

    def run(self, turns: tuple[int, ...]):
        shards, owner = len(self.buffers), 1 % len(self.buffers)
        for index, turn in enumerate(turns):
            word = 1000 * index + self.number
            for to in [owner] if self.two_shots else range(shards):
                self.send(to, turn, self.number, word)
                yield True
            total = 0
            if not self.two_shots or self.number == owner:
                for source in range(shards):
                    total += yield from self.receive(turn, source)
            if self.two_shots:
                for to in range(shards) if self.number == owner else ():
                    self.send(to, turn, owner, total)
                    yield True
                total = yield from self.receive(turn, owner)
            self.sums.append(total)


def play(shards: int, turns: tuple[int, ...], two_shots: bool, seed: int) -> None:
    """Any shard may stop anywhere for any time, as long as one can go on."""
    rng, buffers = random.Random(seed), [{} for _ in range(shards)]
    players = [Shard(number, turns, two_shots, buffers) for number in range(shards)]
    running, favourite = set(range(shards)), 0
    while running:
        if rng.random() < 0.05:
            favourite = rng.choice(sorted(running))  # runs far ahead of the others
        stuck = True
        for number in [favourite] * 20 + sorted(running):
            if number in running and (number == favourite or rng.random() < 0.5):
                try:
                    stuck &= not next(players[number].work)
                except StopIteration:
                    running.discard(number)
                    stuck = False
        if stuck:  # nobody that was asked could go on: ask all
            moved = [number for number in sorted(running) if next(players[number].work, True)]
            assert moved, "all wait for each other"
    for index in range(len(turns)):
        assert {player.sums[index] for player in players} == {sum(1000 * index + n for n in range(shards))}


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_no_row_is_overwritten_before_it_was_read(shards: int, two_shots: bool) -> None:
    for seed in range(60):
        play(shards, STEP * 3, two_shots, seed)


def test_the_same_turn_twice_would_be_seen() -> None:
    """What the turns are for: without them a fast shard overwrites what a slow one hasn't read."""

    def play_all() -> None:
        for seed in range(60):
            play(2, (0, 0, 0, 0), False, seed)

    with pytest.raises(AssertionError, match="nobody has read"):
        play_all()


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize(
    ("shards", "size", "dtype"), [(2, 4096, "bfloat16"), (8, 2560, "bfloat16"), (4, 1024, "float32")]
)
def test_the_sum_lowers_to_one_launch(shards: int, size: int, dtype: str, two_shots: bool) -> None:
    function = functools.partial(all_reduce_add_rms_norm, turn=1, capacity=64, eps=1e-6, two_shots=two_shots)
    rows, weights = (jax.ShapeDtypeStruct((n, size), jnp.dtype(dtype)) for n in (8, 3))
    row, peers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, 3 + 2 * shards), jnp.int32)
    text = cuda_text(function, (rows, rows, weights, row, peers))
    assert text.count(MOSAIC_CALL) == 1 and "uses_xla_collective_metadata = false" in text


def test_the_best_candidate_lowers_to_one_launch() -> None:
    function = functools.partial(best_of_shards, offset=4096, max_seqs=300)
    values, ids, peers = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
                          (((300,), jnp.float32), ((300,), jnp.int32), ((1, 7), jnp.int32)))  # fmt: skip
    assert cuda_text(function, (values, ids, peers)).count(MOSAIC_CALL) == 1


@pytest.mark.parametrize(("tokens", "size"), [(9, 4096), (4, 640)])
def test_what_has_no_room_is_refused(tokens: int, size: int) -> None:
    rows = jnp.zeros((tokens, size), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{tokens} tokens of {size} bfloat16.*room for 8"):
        all_reduce_add_rms_norm(rows, rows, rows[:1], 0, jnp.zeros((1, 7), jnp.int32), turn=0, capacity=8, eps=1e-6)
