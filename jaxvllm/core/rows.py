"""Rows: the moving numbers of all admitted requests, as numpy arrays indexed by row.

A row is a request's index on the device (its last sampled token lives at `last_tokens[row]` there) and in
the arrays here. Owns who sits in which row. Must not know about queues or why a request comes and goes.

In the steady state of decoding every request does the same thing, so one numpy operation on `array[rows]`
does it for all of them; a Python loop over 256 requests would cost more than the rest of the host's step.
"""

from __future__ import annotations

import numpy as np

from jaxvllm.core.knobs import knobs_of, neutral_knobs
from jaxvllm.core.request import Request


class Rows:
    """State by row. R rows, W blocks in the longest table, M tokens in the longest request.

    num_known, num_tokens, num_computed   int32[R], see `request`
    token_limit                           int32[R], the request ends when it has this many tokens
    num_blocks, block_tables              int32[R], int32[R, W]; entries past num_blocks are 0
    tokens                                int32[R, M], the known ids; anything past num_known is stale
    temperature, seed                     float32[R], uint64[R]
    knobs, processed                      int32[R, K] of `knobs`, bool[R]: whether it needs processors
    decoding                              bool[R], a step has sampled for it in this row: its next input is the
                                          row's last token on the device
    epoch                                 int32[R], grows when the row is given back: a step remembers it, so
                                          that its commit can tell whether the row still is the same request's
    request                               object[R], Request or None
    """

    __slots__ = (
        "_free",
        "block_tables",
        "decoding",
        "epoch",
        "growable",
        "knobs",
        "num_blocks",
        "num_computed",
        "num_known",
        "num_tokens",
        "processed",
        "request",
        "seed",
        "temperature",
        "token_limit",
        "tokens",
    )

    def __init__(self, num_rows: int, table_width: int, max_tokens: int, growable: bool) -> None:
        """`growable`: double the arrays instead of running out of rows, for replay."""
        self.growable = growable
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.token_limit = np.zeros(num_rows, np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.block_tables = np.zeros((num_rows, table_width), np.int32)
        # Large, but the system gives memory only where it is written.
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, "<u8")  # so that its words are low, high on any machine
        self.knobs = neutral_knobs(num_rows)
        self.processed = np.zeros(num_rows, bool)
        self.decoding = np.zeros(num_rows, bool)
        self.epoch = np.zeros(num_rows, np.int32)
        self.request = np.full(num_rows, None, object)
        self._free = list(range(num_rows - 1, -1, -1))  # a stack: row 0 on top

    @property
    def num_rows(self) -> int:
        """Rows that exist now, free or not."""
        return len(self.epoch)

    @property
    def has_free(self) -> bool:
        """Whether another request can be given a row."""
        return self.growable or bool(self._free)

    def assign(self, request: Request, blocks: list[int], num_computed: int) -> int:
        """Give `request` a row, its block table and `num_computed` tokens that are in the cache already."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        known = request.known_tokens()
        self.num_known[row] = len(known)
        self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = num_computed
        self.token_limit[row] = request.token_limit
        self.num_blocks[row] = len(blocks)
        self.block_tables[row, : len(blocks)] = blocks
        self.tokens[row, : len(known)] = known
        self.temperature[row] = request.params.temperature
        self.seed[row] = request.seed
        self.knobs[row] = knobs_of(request)
        self.processed[row] = request.params.needs_processors
        self.decoding[row] = False
        self.request[row] = request
        request.rows, request.row = self, row
        return row

    def release(self, request: Request) -> list[int]:
        """Take the row back; return the blocks of its table. Outputs and tokens in flight stay."""
        row, blocks = request.row, request.block_table
        output = self.tokens[row, request.num_prompt : self.num_known[row]].copy()
        in_flight = request.num_in_flight
        self.block_tables[row, : len(blocks)] = 0
        self.num_blocks[row] = 0
        self.epoch[row] += 1
        self.request[row] = None
        request.rows, request.row = None, -1
        request.detached_output, request.detached_in_flight = output, in_flight
        self._free.append(row)
        return blocks

    def holders(self) -> list[Request]:
        """All requests that have a row, by row."""
        return [request for request in self.request.tolist() if request is not None]

    def _grow(self) -> None:
        """Twice as many rows; every array is replaced, so nobody may keep one across an `assign`."""
        if not self.growable:
            raise AssertionError(f"all {self.num_rows} rows are taken")
        old = self.num_rows
        for name in self.__slots__:
            array = getattr(self, name)
            if isinstance(array, np.ndarray):
                empty = np.full_like(array, None) if array.dtype == object else np.zeros_like(array)
                setattr(self, name, np.concatenate([array, empty]))
        self._free = list(range(2 * old - 1, old - 1, -1))
