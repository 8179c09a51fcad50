"""Who computes what in the Mosaic prefill kernel: every item once, and nobody much longer than need be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels.prefill_mosaic import PrefillConfig, ragged_attention
from jaxvllm.kernels.prefill_mosaic_program import Item, Program
from jaxvllm.kernels.prefill_mosaic_work import deal, packed, work_table

KV_TILE, QUERY_TILE = 128, 64


SEQS, TILES = 256, 300  # one shape for all steps: compiled once


def table_of(steps: list[tuple[int, int]]) -> np.ndarray:
    """The work table of sequences (new tokens, context), padded."""
    tokens, contexts = np.zeros(SEQS, np.int32), np.zeros(SEQS, np.int32)
    if steps:
        tokens[: len(steps)], contexts[: len(steps)] = np.array(steps).T
    starts = np.concatenate([[0], tokens.cumsum()]).astype(np.int32)
    tiles = [(seq, starts[seq] + first) for seq, (n, _) in enumerate(steps) for first in range(0, n, QUERY_TILE)]
    tiles += [(-1, 0)] * (TILES - len(tiles))
    tile_seq, tile_start = np.array(tiles, np.int32).T
    return np.asarray(make_table(*map(jnp.asarray, (contexts, starts, tile_seq, tile_start)), query_tile=QUERY_TILE))


make_table = jax.jit(work_table, static_argnames="query_tile")
make_deal = jax.jit(deal, static_argnames=("long_items", "short_items", "kv_tile", "programs"))


def items_of(work: np.ndarray, long_items: int, short_items: int, programs: int) -> list[list[tuple[int, int]]]:
    """By program, the (row of the table, number within its tile) of its items, as `deal` promises them."""
    dealt = np.asarray(make_deal(jnp.asarray(work), long_items=long_items, short_items=short_items, kv_tile=KV_TILE,
                            programs=programs))  # fmt: skip
    everybody = []
    for program, (longs, first, shorts) in enumerate(dealt.tolist()):
        mine = [r * programs + (program if r % 2 == 0 else programs - 1 - program) for r in range(longs)]
        everybody.append([divmod(item, long_items) for item in mine])
        everybody[-1] += [divmod(item, short_items) for item in range(first, first + shorts)]
    return everybody


def test_the_table_has_tiles_of_several_tokens_first_and_the_heaviest_of_each_kind() -> None:
    table = table_of([(1, 1), (70, 200), (1, 150), (33, 40)])
    fields = ("sequence", "first token", "tokens", "position", "context")
    assert [dict(zip(fields, row, strict=True)) for row in table.tolist() if row[2]] == [
        {"sequence": 1, "first token": 65, "tokens": 6, "position": 194, "context": 200},
        {"sequence": 1, "first token": 1, "tokens": 64, "position": 130, "context": 194},
        {"sequence": 3, "first token": 72, "tokens": 33, "position": 7, "context": 40},
        {"sequence": 2, "first token": 71, "tokens": 1, "position": 149, "context": 150},
        {"sequence": 0, "first token": 0, "tokens": 1, "position": 0, "context": 1},
    ]
    assert (table[5:, 2] == 0).all()


@pytest.mark.parametrize("seed", range(12))
def test_every_item_is_somebodys_and_nobodys_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [(1, int(rng.integers(1, 500))) for _ in range(rng.integers(0, 30))]
    for _ in range(rng.integers(0, 4)):
        count = int(rng.integers(1, 200))
        steps.append((count, count + int(rng.integers(0, 2000))))
    rng.shuffle(steps)
    work = table_of([(int(n), int(c)) for n, c in steps])
    long_items, short_items, programs = [(16, 8, 132), (8, 8, 7), (6, 2, 132), (1, 1, 3)][seed % 4]
    want = [(row, i) for row, tokens in enumerate(work[:, 2].tolist())
            for i in range({0: 0, 1: short_items}.get(tokens, long_items))]  # fmt: skip
    got = items_of(work, long_items, short_items, programs)
    assert sorted(item for items in got for item in items) == want


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_program_reads_what_it_was_dealt(lanes: int) -> None:
    """From the packed tables: the same items, with their tile's fields and their first head."""
    heads, groups, programs = 2, 8, 5
    work = table_of([(1, 70), (150, 900), (1, 1), (33, 33), (1, 4000), (64, 100_000)])
    dealt = make_deal(work, long_items=groups, short_items=groups // lanes, kv_tile=KV_TILE, programs=programs)
    rows, deals = packed(jnp.asarray(work), dealt)
    want = items_of(work, groups, groups // lanes, programs)
    q = jax.ShapeDtypeStruct((300, groups * heads, 64), jnp.bfloat16)
    config = PrefillConfig(heads, tile=KV_TILE, num_stages=2, num_sms=programs, lanes=lanes)
    for sm in range(programs):
        tables = None, rows, deals  # after the queries, keys and values and block tables, which aren't asked
        program = Program(config, 1.0, 2, 1, 4, True, jnp.int32(sm), None, q, None, None, *tables, *[None] * 9)
        seen = noted(program)
        expected, before = [], 0
        for index, (row, number) in enumerate(want[sm]):
            head = number * heads * (lanes if work[row, 2] == 1 else 1)
            expected.append((index, before, *work[row].tolist(), head))
            before += -(-int(work[row, 4]) // KV_TILE)
        assert seen == [*expected, (len(expected), before)]


def test_an_item_is_unpacked_to_the_last_bit() -> None:
    work = np.zeros((400, 5), np.int32)
    work[299] = 65_535, 70_000, 192, 130_000, 130_192
    work[301] = 40_000, 70_192, 1, 131_070, 131_071
    rows, deals = packed(jnp.asarray(work), jnp.array([[300, 301, 65_000]], jnp.int32))
    config = PrefillConfig(1, tile=KV_TILE, num_stages=2, num_sms=1)
    q = jax.ShapeDtypeStruct((8, 1, 64), jnp.bfloat16)
    program = Program(config, 1.0, 2, 1, 1, True, jnp.int32(0), None, q, None, None, None, rows, deals, *[None] * 9)
    for number, row in ((299, 299), (300, 301)):  # the last long one, the first short one
        item = Item(*program.item(jnp.int32(number), *deals[0]))
        fields = item.seq, item.start, item.count, item.position, item.context
        assert [int(field) for field in fields] == work[row].tolist()
    long_ones, everybody = 300, 65_300
    assert int(deals[0, 1] & 0xFFFF) == long_ones and int(program.each_item(lambda *_: None)[0]) == everybody


def noted(program: Program) -> list[tuple[int, ...]]:
    """What `each_item` calls with, and returns."""
    seen: list[tuple[int, ...]] = []

    def note(index: jax.Array, tiles: jax.Array, item: Item) -> None:
        fields = index, tiles, item.seq, item.start, item.count, item.position, item.context, item.head
        jax.debug.callback(lambda *fields: seen.append(tuple(map(int, fields))), *fields, ordered=True)

    counts = jax.jit(lambda: program.each_item(note))()
    jax.effects_barrier()
    return [*seen, tuple(map(int, counts))]


UNEVEN = [(704, 15_000, 64), (704, 8000, 64), (128, 128, 200), (64, 64, 1), (2000, 2000, 30), (448, 15_000, 100)]


@pytest.mark.parametrize(("chunk", "context", "rows"), UNEVEN)
def test_short_items_fill_what_the_long_ones_leave_uneven(chunk: int, context: int, rows: int) -> None:
    """A lower bound of any deal is the mean, or what the long items alone need: at most one short item above it."""
    rng = np.random.default_rng(0)
    work = table_of([(1, int(rng.integers(500, 2000))) for _ in range(rows)] + [(chunk, context)])
    costs = -(-np.maximum(work[:, 4], 0) // KV_TILE) + 1
    long = work[:, 2] > 1
    everybody = items_of(work, 16, 8, programs=132)
    loads = np.array([sum(costs[row] for row, _ in items) for items in everybody])
    longs = np.array([sum(costs[row] for row, _ in items if long[row]) for items in everybody])
    assert loads.max() <= max(longs.max(), loads.mean()) + costs[work[:, 2] == 1].max()


def test_a_step_without_work_gives_nobody_anything() -> None:
    assert items_of(table_of([]), 16, 8, 132) == [[]] * 132


def test_more_than_the_tables_hold_is_refused() -> None:
    q, kv = jnp.zeros((8, 2, 64), jnp.bfloat16), jnp.zeros((1, 2, 4, 1, 16, 64), jnp.bfloat16)
    none = jnp.zeros(70_000, jnp.int32)
    for rows, tiles, what in ((4, 70_000, "70000 items"), (70_000, 4, "70000 rows")):
        plan = none[:rows, None], none[:rows], jnp.zeros(rows + 1, jnp.int32), none[:tiles] - 1, none[:tiles]
        with pytest.raises(ValueError, match=f"{what} a step: the mosaic kernel has 65535 at most"):
            ragged_attention(q, kv, 0, *plan, scale=1.0, query_tile=64, interpret=True)
