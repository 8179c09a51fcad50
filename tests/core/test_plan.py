"""The plan: one buffer, one table of fields, pads that reach nothing, tiles that cover everything once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core import Bucket, PlanLayout, Request, ScheduledStep, Scheduler, fill_plan
from jaxvllm.core.buckets import QUERY_TILE
from jaxvllm.sampling_params import SamplingParams
from tests.core.fake_device import unpack
from tests.core.helpers import PROPERTY, Loop, count_up, make_request, make_scheduler
from tests.core.workloads import workloads

BUCKETS = [Bucket("decode", 1, 1), Bucket("decode", 8, 8), Bucket("ragged", 16, 4), Bucket("ragged", 256, 8)]
COMMON = {
    "token_ids": ("T", "int32"),
    "token_src": ("T", "int32"),
    "positions": ("T", "int32"),
    "slot_mapping": ("T", "int32"),
    "context_lens": ("B", "int32"),
    "rows": ("B", "int32"),
    "seeds": ("B2", "uint32"),
    "sample_positions": ("B", "int32"),
    "temperatures": ("B", "float32"),
    "block_tables": ("BW", "int32"),
}
RAGGED = {"query_start": ("B+1", "int32"), "tile_seq": ("N", "int32"), "tile_start": ("N", "int32")}


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_the_fields_have_their_shapes_and_lie_aligned_in_the_buffer(bucket):
    layout = PlanLayout(bucket, table_width=5, max_rows=8, drop_slot=640)
    tokens, seqs = bucket.num_tokens, bucket.num_seqs
    sizes = {
        "T": (tokens,),
        "B": (seqs,),
        "B2": (seqs, 2),
        "BW": (seqs, 5),
        "B+1": (seqs + 1,),
        "N": (tokens // QUERY_TILE + seqs,),
    }
    expected = COMMON if bucket.kind == "decode" else COMMON | RAGGED
    assert {name: (shape, dtype) for name, _, shape, dtype in layout.fields} == {
        name: (sizes[size], dtype) for name, (size, dtype) in expected.items()
    }
    end = 0
    for _, offset, shape, _ in layout.fields:
        assert end <= offset < end + 64
        assert offset * 4 % 256 == 0  # what Mosaic's kernels ask of an operand
        end = offset + math.prod(shape)
    assert layout.size == end


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_views_are_the_buffer(bucket):
    """Writing through the views and slicing by the table, as the device does, are the same thing."""
    layout = PlanLayout(bucket, table_width=3, max_rows=8, drop_slot=640)
    buffer = np.zeros(layout.size, np.int32)
    plan = layout.views(buffer)
    rng = np.random.default_rng(0)
    written = {}
    for name, _, shape, dtype in layout.fields:
        values = rng.uniform(0, 2**31, shape).astype(dtype)
        getattr(plan, name)[...] = values
        written[name] = values.tolist()
    assert unpack(buffer, layout) == written


def test_a_wrong_buffer_is_refused():
    layout = PlanLayout(BUCKETS[0], table_width=3, max_rows=8, drop_slot=640)
    for buffer in (np.zeros(layout.size + 1, np.int32), np.zeros(layout.size, np.float32)):
        with pytest.raises(ValueError, match=rf"not int32\[{layout.size}\]"):
            layout.views(buffer)


@pytest.mark.parametrize(
    ("field", "value"),
    [("table_width", 0), ("max_rows", 0), ("drop_slot", 0), ("drop_slot", 2**31), ("query_tile", 0)],
)
def test_a_bad_layout_is_named(field, value):
    sizes = {"table_width": 3, "max_rows": 8, "drop_slot": 640, field: value}
    with pytest.raises(ValueError, match=f"{field}={value}"):
        PlanLayout(BUCKETS[0], **sizes)


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_an_empty_plan_reaches_nothing_and_is_fresh_memory(bucket):
    layout = PlanLayout(bucket, table_width=3, max_rows=8, drop_slot=640)
    buffer = layout.empty()
    assert not np.shares_memory(buffer, layout.empty())
    plan = unpack(buffer, layout)
    assert set(plan["slot_mapping"]) == {640}
    assert set(plan["rows"]) == {8}
    assert set(plan["token_src"]) == {-1}
    assert set(plan["context_lens"]) == {0}
    assert set(plan["temperatures"]) == {0.0}
    if bucket.kind == "ragged":
        assert set(plan["query_start"]) == {0}
        assert set(plan["tile_seq"]) == {-1}


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_a_prompt_step_by_hand():
    """Two prompts, the second with its first block in the cache; block size 4; tiles of 3 tokens."""
    scheduler = make_scheduler(block_size=4, num_blocks=16, max_running=6)
    seeded = SamplingParams(max_tokens=4, temperature=0.5, seed=(3 << 32) + 9)
    first = Request.create("a", 0, [11, 12, 13, 14, 15], seeded, model_eos=(), engine_seed=0)
    scheduler.add(first)
    step = schedule(scheduler)
    scheduler.commit(step, count_up(step))
    second = make_request(1, [21, 22], max_tokens=4, temperature=0.0)
    third = make_request(2, [11, 12, 13, 14, 15, 16, 17, 18], max_tokens=4, temperature=2.0)
    scheduler.add(second)
    scheduler.add(third)
    step = schedule(scheduler)
    layout = PlanLayout(Bucket("ragged", 9, 4), scheduler.table_width, 6, drop_slot=64, query_tile=3)
    plan = unpack(fill_plan(step, scheduler, layout), layout)
    assert (second.block_table, third.block_table) == ([2], [0, 3])
    width = scheduler.table_width
    assert plan == {
        #              |- second -|------ third ------|- pads --|
        "token_ids": [21, 22, 15, 16, 17, 18, 0, 0, 0],
        "token_src": [-1] * 9,
        "positions": [0, 1, 4, 5, 6, 7, 0, 0, 0],
        "slot_mapping": [8, 9, 12, 13, 14, 15, 64, 64, 64],
        "context_lens": [2, 8, 0, 0],
        "rows": [1, 2, 6, 6],
        "seeds": [[s.seed & 0xFFFFFFFF, s.seed >> 32] for s in (second, third)] + [[0, 0]] * 2,
        "sample_positions": [2, 8, 0, 0],
        "temperatures": [0.0, 2.0, 0.0, 0.0],
        "block_tables": [[2] + [0] * (width - 1), [0, 3] + [0] * (width - 2), [0] * width, [0] * width],
        "query_start": [0, 2, 6, 6, 6],
        "tile_seq": [0, 1, 1, -1, -1, -1, -1],
        "tile_start": [0, 2, 5, 0, 0, 0, 0],
    }
    scheduler.commit(step, count_up(step))

    step = schedule(scheduler)  # a decode step of all three
    layout = PlanLayout(Bucket("decode", 4, 4), scheduler.table_width, 6, drop_slot=64)
    plan = unpack(fill_plan(step, scheduler, layout), layout)
    assert plan == {
        "token_ids": [0] * 4,
        "token_src": [0, 1, 2, -1],  # the last token of each row, on the device
        "positions": [5, 2, 8, 0],
        "slot_mapping": [1 * 4 + 1, 2 * 4 + 2, 4 * 4, 64],
        "context_lens": [6, 3, 9, 0],
        "rows": [0, 1, 2, 6],
        "seeds": [[9, 3]] + [[s.seed & 0xFFFFFFFF, s.seed >> 32] for s in (second, third)] + [[0, 0]],
        "sample_positions": [6, 3, 9, 0],
        "temperatures": [0.5, 0.0, 2.0, 0.0],
        "block_tables": [
            [0, 1] + [0] * (width - 2),
            [2] + [0] * (width - 1),
            [0, 3, 4] + [0] * (width - 3),
            [0] * width,
        ],
    }


def test_a_step_that_does_not_fit_is_refused():
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for i in range(3):
        scheduler.add(make_request(i, [i] * 9, max_tokens=3))
    step = schedule(scheduler)
    width = scheduler.table_width
    for bucket, table_width, message in (
        (Bucket("ragged", 27, 2), width, "step of 3 sequences"),
        (Bucket("ragged", 26, 4), width, "step of 27 tokens doesn't fit ragged-26"),
        (Bucket("ragged", 27, 4), 2, "a block table of 3 blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            fill_plan(step, scheduler, PlanLayout(bucket, table_width, 8, 256))
    fill_plan(step, scheduler, PlanLayout(Bucket("ragged", 27, 3), 3, 8, 256))


def test_wide_tables_are_filled_like_narrow_ones():
    """Two ways of copying block tables; which one is taken depends on the width."""
    for max_model_len in (40, 4000):
        scheduler = make_scheduler(block_size=4, num_blocks=1000, max_model_len=max_model_len)
        requests = [make_request(i, [i] * (5 + 9 * i), max_tokens=3) for i in range(3)]
        for request in requests:
            scheduler.add(request)
        loop = Loop(scheduler)
        loop.step()
        step = schedule(scheduler)
        layout = PlanLayout(Bucket("decode", 8, 8), scheduler.table_width, 16, 4000)
        tables = unpack(fill_plan(step, scheduler, layout), layout)["block_tables"]
        for request, table in zip(requests, tables, strict=False):
            assert table == request.block_table + [0] * (scheduler.table_width - len(request.block_table))
        assert not np.any(tables[3:])


@PROPERTY
@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(1, 70), st.integers(0, 40))
def test_tiles_cover_every_query_token_exactly_once(lengths, query_tile, padding):
    scheduler = make_scheduler(block_size=16, num_blocks=200, max_num_batched_tokens=2000, enable_prefix_caching=False)
    for i, length in enumerate(lengths):
        scheduler.add(make_request(i, [1] * length))
    step = schedule(scheduler)
    assert step.num_tokens.tolist() == lengths
    total = sum(lengths)
    bucket = Bucket("ragged", total + padding, min(8, total + padding))
    layout = PlanLayout(bucket, scheduler.table_width, 16, 3200, query_tile)
    plan = unpack(fill_plan(step, scheduler, layout), layout)
    covered = []
    for seq, start in zip(plan["tile_seq"], plan["tile_start"], strict=True):
        if seq >= 0:
            tile = range(start, min(start + query_tile, plan["query_start"][seq + 1]))
            assert len(tile) > 0
            assert plan["query_start"][seq] <= start
            covered += tile
    assert covered == list(range(total))


@PROPERTY
@given(workloads())
def test_nothing_but_the_scheduled_tokens_is_written(workload):
    """Over whole random runs: the live slots and rows of a plan are exactly its requests' own."""
    scheduler = make_scheduler(**workload.config)
    size = scheduler.block_size
    drop = scheduler.pool.num_blocks * size
    for number, wish in enumerate(workload.wishes):
        scheduler.add(make_request(number, wish.prompt, wish.max_tokens))
    while scheduler.has_unfinished():
        step = schedule(scheduler)
        total, seqs = step.num_query_tokens, len(step.requests)
        bucket = Bucket("ragged", total + 5, seqs)
        if step.kind == "decode":
            bucket = Bucket("decode", seqs + 2, seqs + 2)
        layout = PlanLayout(bucket, scheduler.table_width, 64, drop, query_tile=2)
        plan = unpack(fill_plan(step, scheduler, layout), layout)
        slots = [
            request.block_table[position // size] * size + position % size
            for request, start, count in zip(step.requests, step.starts, step.num_tokens, strict=True)
            for position in range(start, start + count)
        ]
        assert plan["slot_mapping"] == slots + [drop] * (bucket.num_tokens - total)
        assert len(set(slots)) == total
        # Nobody else reads what is written: only full blocks are ever shared.
        holders = [request.block_table for request in scheduler.rows.holders()]
        assert all(sum(slot // size in table for table in holders) == 1 for slot in slots)
        rows = [r.row if samples else 64 for r, samples in zip(step.requests, step.samples, strict=True)]
        assert plan["rows"] == rows + [64] * (bucket.num_seqs - seqs)
        scheduler.commit(step, count_up(step))
