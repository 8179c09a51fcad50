"""The plan: everything the device must know about one step, as named views of one int32 buffer.

Owns the layout of that buffer, once, for both sides: the host writes through numpy views
(`PlanLayout.views`), the compiled step slices the same words by the same table (`PlanLayout.fields`). One
buffer is one copy to the device: 6 us measured, against 47 us for twenty arrays. Must not know about
models, kernels or jax.

A ragged step packs the new tokens of its sequences one after the other; T tokens, B sequences, W blocks in
a table:

    token axis        0                  5        8                       15      T
    sequences         |---- seq 0 ------|- seq 1 -|------- seq 2 ---------|- pads -|
    query_start       0                  5        8                       15 15 15 (pads repeat the total)

Attention works in tiles of up to `query_tile` consecutive query tokens of one sequence. With tiles of 4
tokens:

    tiles             [0..4)[4..5)       [5..8)   [8..12)  [12..15)
    tile_seq          0     0            1        2        2         -1 -1 ...
    tile_start        0     4            5        8        12         0  0 ...

Sum of ceil(n_b / tile) <= T // tile + B, so that many tiles always suffice.

Pads can't reach a live slot or row: their slots are `drop_slot`, one past the cache, and their rows
`max_rows`, one past the last row; the device drops what is written there. (Index -1 would be the last
slot.) They read nothing: their context_lens are 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxvllm.core.buckets import QUERY_TILE, Bucket

if TYPE_CHECKING:
    from jaxvllm.core.rows import Rows
    from jaxvllm.core.scheduler import Scheduler
    from jaxvllm.core.step import ScheduledStep


@dataclass(slots=True)
class StepPlan:
    """Named arrays of one step. T tokens, B sequences, W blocks, N tiles.

    By token:
      token_ids       int32[T]     ids that the host knows
      token_src       int32[T]     row whose last token, still on the device, is the input; -1: token_ids
      positions       int32[T]     place in the sequence, from 0
      slot_mapping    int32[T]     where keys and values go: block * block_size + offset; pads drop_slot
    By sequence:
      context_lens    int32[B]     tokens in the cache once this step has written; pads 0
      rows            int32[B]     where the sampled token is stored; max_rows for pads and no sample
      seeds           uint32[B, 2] low and high word of the sampling key
      sample_positions int32[B]    tokens before the sampled one: the other half of the noise's key
      temperatures    float32[B]   0: greedy
      block_tables    int32[B, W]  past the blocks of a sequence: 0
    Ragged steps only:
      query_start     int32[B + 1] first token of each sequence, see the module
      tile_seq        int32[N]     sequence of a tile, -1: nothing to do
      tile_start      int32[N]     first token of a tile
    """

    token_ids: np.ndarray
    token_src: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    context_lens: np.ndarray
    rows: np.ndarray
    seeds: np.ndarray
    sample_positions: np.ndarray
    temperatures: np.ndarray
    block_tables: np.ndarray
    query_start: np.ndarray | None = None
    tile_seq: np.ndarray | None = None
    tile_start: np.ndarray | None = None


ALIGNMENT = 64
"""Words at whose multiples fields begin: 256 bytes. A kernel may get a field as it lies in the buffer, and Mosaic's
refuse operands that begin elsewhere."""


class PlanLayout:
    """Where each field of a bucket's plan lies.

    fields    tuple of (name, offset in words, shape, dtype name); every dtype has 4 bytes, so that uint32
              and float32 fields are bit views of the same int32 words
    size      words in the buffer
    """

    def __init__(
        self, bucket: Bucket, table_width: int, max_rows: int, drop_slot: int, query_tile: int = QUERY_TILE
    ) -> None:
        """`table_width` blocks in a table; rows lie in [0, max_rows), slots in [0, drop_slot)."""
        for name, value in (("table_width", table_width), ("max_rows", max_rows), ("query_tile", query_tile)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 1 <= drop_slot < 2**31:
            raise ValueError(f"drop_slot={drop_slot} must be num_blocks * block_size and fit in int32")
        self.bucket = bucket
        self.table_width = table_width
        self.max_rows = max_rows
        self.drop_slot = drop_slot
        self.query_tile = query_tile
        self.fields: tuple[tuple[str, int, tuple[int, ...], str], ...]
        self.fields, self.size = self._place()
        self._views = [(name, shape, np.dtype(dtype), 4 * offset) for name, offset, shape, dtype in self.fields]
        # A step of pads only, up to the block tables: those are last and all 0.
        self._pads = np.zeros(self.size, np.int32)
        pads = self.views(self._pads)
        pads.token_src[:] = -1
        pads.slot_mapping[:] = drop_slot
        pads.rows[:] = max_rows
        if pads.tile_seq is not None:
            pads.tile_seq[:] = -1
        self._pads = self._pads[: self.size - pads.block_tables.size].copy()

    def empty(self) -> np.ndarray:
        """int32[size], fresh memory: a step of pads only."""
        buffer = np.zeros(self.size, np.int32)
        buffer[: len(self._pads)] = self._pads
        return buffer

    def views(self, buffer: np.ndarray) -> StepPlan:
        """The fields of `buffer` (int32[size], contiguous) as writable views."""
        if buffer.dtype != np.int32 or buffer.shape != (self.size,):
            raise ValueError(f"buffer is {buffer.dtype}{list(buffer.shape)}, not int32[{self.size}]")
        return StepPlan(**{name: np.ndarray(shape, dtype, buffer, at) for name, shape, dtype, at in self._views})

    def _place(self) -> tuple[tuple[tuple[str, int, tuple[int, ...], str], ...], int]:
        tokens, seqs = self.bucket.num_tokens, self.bucket.num_seqs
        shapes: list[tuple[str, tuple[int, ...], str]] = [
            ("token_ids", (tokens,), "int32"),
            ("token_src", (tokens,), "int32"),
            ("positions", (tokens,), "int32"),
            ("slot_mapping", (tokens,), "int32"),
            ("context_lens", (seqs,), "int32"),
            ("rows", (seqs,), "int32"),
            ("seeds", (seqs, 2), "uint32"),
            ("sample_positions", (seqs,), "int32"),
            ("temperatures", (seqs,), "float32"),
        ]
        if self.bucket.kind == "ragged":
            tiles = tokens // self.query_tile + seqs
            shapes += [
                ("query_start", (seqs + 1,), "int32"),
                ("tile_seq", (tiles,), "int32"),
                ("tile_start", (tiles,), "int32"),
            ]
        shapes.append(("block_tables", (seqs, self.table_width), "int32"))
        fields, offset = [], 0
        for name, shape, dtype in shapes:
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            fields.append((name, offset, shape, dtype))
            offset += math.prod(shape)
        return tuple(fields), offset


def fill_plan(step: ScheduledStep, scheduler: Scheduler, layout: PlanLayout) -> np.ndarray:
    """int32[layout.size], fresh memory: `step` in the words that the device reads.

    Call it right after `schedule()`, before anything else changes. ValueError if the step doesn't fit the
    layout.
    """
    state, rows = scheduler.rows, step.rows
    num_seqs = len(rows)
    buffer = layout.empty()
    plan = layout.views(buffer)
    if num_seqs > layout.bucket.num_seqs:
        raise ValueError(
            f"step of {num_seqs} sequences doesn't fit {layout.bucket}, {layout.bucket.num_seqs} sequences"
        )
    ends = step.starts + step.num_tokens
    plan.context_lens[:num_seqs] = ends
    np.copyto(plan.rows[:num_seqs], rows, "same_kind", where=step.samples)
    plan.seeds[:num_seqs] = state.seed[rows].view("<u4").reshape(-1, 2)
    plan.sample_positions[:num_seqs] = ends
    plan.temperatures[:num_seqs] = state.temperature[rows]
    _copy_tables(plan.block_tables[:num_seqs], state, rows)

    if layout.bucket.kind == "decode":
        num_tokens, token_rows, positions = num_seqs, rows, step.starts
        plan.token_src[:num_tokens] = rows  # the input is always the row's last sampled token
    else:
        query_start = np.concatenate([[0], step.num_tokens.cumsum()])
        num_tokens = int(query_start[-1])
        if num_tokens > layout.bucket.num_tokens:
            raise ValueError(f"step of {num_tokens} tokens doesn't fit {layout.bucket}")
        token_rows = np.repeat(rows, step.num_tokens)
        positions = np.arange(num_tokens) + np.repeat(step.starts - query_start[:-1], step.num_tokens)
        # Prompt tokens come from the host; the one input that may still be in flight, from the device.
        on_host = positions < state.num_known[token_rows]
        plan.token_ids[:num_tokens] = np.where(on_host, state.tokens[token_rows, positions], 0)
        plan.token_src[:num_tokens] = np.where(on_host, -1, token_rows)
        _fill_tiles(plan, query_start, layout.query_tile)
    plan.positions[:num_tokens] = positions
    block = positions // scheduler.block_size
    offset = positions - block * scheduler.block_size
    plan.slot_mapping[:num_tokens] = state.block_tables[token_rows, block] * scheduler.block_size + offset
    return buffer


def _copy_tables(out: np.ndarray, state: Rows, rows: np.ndarray) -> None:
    """The block tables of `rows` into out[B, W], which is 0 so far. ValueError if one is longer than W.

    The largest piece of a plan. Whole rows are one memcpy each: 256 x 64 words take 2 us, 20 columns of them 8. In
    wide tables, of which most requests use little, it pays all the same to leave out the zeros.
    """
    tables = state.block_tables
    if out.shape[1] == tables.shape[1] <= 128:
        tables.take(rows, axis=0, out=out, mode="clip")  # the default mode would copy `out` first
        return
    width = int(state.num_blocks[rows].max())
    if width > out.shape[1]:
        raise ValueError(f"a block table of {width} blocks doesn't fit a plan with table_width={out.shape[1]}")
    out[:, :width] = tables[:, :width][rows]


def _fill_tiles(plan: StepPlan, query_start: np.ndarray, query_tile: int) -> None:
    """Cut each sequence's query tokens into tiles. `query_start` is int[num_seqs + 1]; see the module."""
    assert plan.query_start is not None
    assert plan.tile_seq is not None
    assert plan.tile_start is not None
    plan.query_start[: len(query_start)] = query_start
    plan.query_start[len(query_start) :] = query_start[-1]
    num_tiles = -(-np.diff(query_start) // query_tile)
    first_tile = np.cumsum(num_tiles) - num_tiles
    seq = np.repeat(np.arange(len(num_tiles)), num_tiles)
    plan.tile_seq[: len(seq)] = seq
    plan.tile_start[: len(seq)] = query_start[seq] + (np.arange(len(seq)) - first_tile[seq]) * query_tile
