"""The cache as bookkeeping: which blocks are taken, which are free, and what full blocks contain.

Owns reference counts, the free list and the prefix table. Must not know about requests, queues or devices:
a block is a number, its content a string of token ids.

The life of a block:

                 take                    publish (it is full and written)
        free ------------> held ------------------------------> held, findable
         ^                  |  ^                                     |
         |   release        |  | hold, by another request with the   | release
         |   (last holder)  |  | same prefix: one more holder        | (last holder)
         +------------------+  +-------------------------------------+
         |                                                           v
         +<--------------- take: now it is forgotten ---------- free, findable --- hold: revived

A free block keeps its content and its entry in the prefix table until somebody takes it for something else.
That is why a preempted request often finds its own blocks again.

A block that was never written can't be found. Two things could break that, and neither does: a request preempted in the
very step that was to write its blocks publishes nothing, because publishing follows the write; and in the replay of
vLLM's schedules, which publish when they allot (`publish="at_allocation"`), such blocks are withdrawn (`withdraw`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import xxhash

from jaxvllm.core.free_list import FreeList
from jaxvllm.core.prefix_table import AllPublishers, Expected, LastPublisher

Publish = Literal["after_write", "at_allocation"]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens of keys and values each. All ids are usable.

    `free_list` and `prefix_table` are the policy's choice. `publish` says when the scheduler makes blocks findable:
    "at_allocation" exists for replaying schedules recorded from vLLM, with each step committed at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        free_list: type[FreeList] = FreeList,
        prefix_table: type[LastPublisher] | type[AllPublishers] = LastPublisher,
        publish: Publish = "after_write",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.publish_when = publish
        # Counts reset_prefix_cache(); whoever was admitted before a reset must not publish after it.
        self.generation = 0
        self._free = free_list(range(num_blocks))
        self._ref_count = [0] * num_blocks
        self._hash: list[int | None] = [None] * num_blocks  # of a published block, until it is taken again
        self._content: list[bytes] = [b""] * num_blocks  # its own int32 token ids
        self._new_table = prefix_table
        self._table = prefix_table()  # hash of a whole prefix -> the block that holds its last tokens
        self._expected = Expected()  # hashes that the table will have soon

    @property
    def num_free(self) -> int:
        """Blocks without a holder, findable or not: all of them can be taken."""
        return len(self._free)

    def free_blocks(self) -> list[int]:
        """Free block ids in the order in which they would be taken."""
        return list(self._free)

    def cached_blocks(self) -> list[int]:
        """Sorted ids of the blocks that the prefix table points to."""
        return sorted(block for _, block in self._table.items())

    def in_use(self, block: int) -> bool:
        """Whether anybody holds `block`."""
        return self._ref_count[block] > 0

    def take(self, count: int) -> list[int]:
        """`count` free blocks for new content; what they held is forgotten. Check `num_free` before."""
        blocks = []
        for _ in range(count):
            block = self._free.pop()
            self._forget(block)
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`, as found by `match`; free ones among them are revived."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._free.remove(block)
            self._ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each of a request's blocks, given in table order.

        Last block first: the start of a prefix, which more requests may share, then stays findable longer
        than its end.
        """
        free = []
        for block in reversed(blocks):
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                free.append(block)
        self._free.push(free, [self._hash[block] is not None for block in free])

    def match(self, tokens: np.ndarray, hashes: list[int]) -> list[int]:
        """Blocks that already hold the start of `tokens` (int32[n], contiguous), in order, as many as possible.

        At most (n - 1) // block_size of them: at least one token is left to compute, because the next token
        is sampled from the last one's hidden state, which no cache keeps. `hashes` is the request's chain,
        extended as far as this looks. Nothing is changed in the pool: `hold` the result before anything
        else is taken.

        A hit needs an equal hash and equal tokens in the block itself; that earlier blocks agree rests on
        the chain of 64-bit hashes.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        for i in range((len(tokens) - 1) // self.block_size):
            content = self._block_content(tokens, i)
            if i == len(hashes):
                hashes.append(chain_hash(hashes[-1] if hashes else None, content))
            block = self._table.get(hashes[i])
            if block is None or self._content[block] != content:
                break
            found.append(block)
        return found

    def publish(self, blocks: Sequence[int], first: int, tokens: np.ndarray, hashes: list[int]) -> None:
        """Make `blocks` findable: they are full, written, and hold blocks number `first`, `first + 1`, ...
        of `tokens`.

        `tokens` is int32[n], contiguous, n at least the end of the last of them. The prefix table decides whose entry
        counts when two blocks have equal content.
        """
        if not self.enable_prefix_caching:
            return
        if len(hashes) < first:
            raise AssertionError(f"block number {first} published, but only {len(hashes)} are hashed")
        for i, block in enumerate(blocks, first):
            content = self._block_content(tokens, i)
            if i == len(hashes):
                hashes.append(chain_hash(hashes[-1] if hashes else None, content))
            self._hash[block] = hashes[i]
            self._content[block] = content
            self._table.add(hashes[i], block)
            self._expected.fulfil(hashes[i])

    def withdraw(self, blocks: Sequence[int]) -> None:
        """`blocks`, held by one request alone, were published but will not be written after all: nobody finds them."""
        for block in blocks:
            self._forget(block)

    def expect(self, writer: int, first: int, last: int, tokens: np.ndarray, hashes: list[int]) -> None:
        """Blocks number `first` to `last` - 1 of `tokens` will be published by `writer`, unless it says otherwise."""
        if self.enable_prefix_caching:
            self._extend_chain(tokens, hashes, last)
            self._expected.add(hashes[first:last], writer)

    def expect_no_more(self, writer: int) -> None:
        """`writer` stops, finished or not."""
        self._expected.drop(writer)

    def expected_end(self, tokens: np.ndarray, hashes: list[int], first: int) -> int:
        """How far the prefix of `tokens` will be findable, in blocks, once everything expected is published.

        `first` of its blocks are findable now; the rest is looked for among the expected ones.
        """
        end = first
        while end < (len(tokens) - 1) // self.block_size and self.enable_prefix_caching:
            self._extend_chain(tokens, hashes, end + 1)
            if hashes[end] not in self._expected:
                break
            end += 1
        return end

    def is_expected(self, key: int) -> bool:
        """Whether somebody is computing the prefix with this hash."""
        return key in self._expected

    def _extend_chain(self, tokens: np.ndarray, hashes: list[int], end: int) -> None:
        """Hashes of the first `end` blocks of `tokens`, as far as they are missing."""
        for i in range(len(hashes), end):
            hashes.append(chain_hash(hashes[-1] if hashes else None, self._block_content(tokens, i)))

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, of held blocks too (new weights, say). Holders keep their blocks."""
        self.generation += 1
        self._table = self._new_table()
        self._expected.clear()
        self._hash = [None] * self.num_blocks
        self._content = [b""] * self.num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """AssertionError unless the books agree with `tables`, the block tables of all holders."""
        holders = [0] * self.num_blocks
        for table in tables:
            for block in table:
                holders[block] += 1
            _check(len(set(table)) == len(table), f"a table holds a block twice: {list(table)}")
        _check(holders == self._ref_count, f"reference counts {self._ref_count} but held {holders} times")
        free = list(self._free)
        unheld = {block for block, count in enumerate(holders) if count == 0}
        _check(len(free) == len(unheld), f"free list {free} but unheld {sorted(unheld)}")
        _check(set(free) == unheld, f"free list {free} but unheld {sorted(unheld)}")
        for key, block in self._table.items():
            _check(self._hash[block] == key, f"prefix table leads to block {block}, which has another hash")
            _check(len(self._content[block]) == 4 * self.block_size, f"cached block {block} is not full")

    def _forget(self, block: int) -> None:
        """`block` is about to be overwritten."""
        key = self._hash[block]
        if key is not None:
            self._table.drop(key, block)
            self._hash[block] = None
            self._content[block] = b""

    def _block_content(self, tokens: np.ndarray, i: int) -> bytes:
        return tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()


def chain_hash(parent: int | None, content: bytes) -> int:
    """The hash of a whole prefix from the hash of all but its last block, and that block's tokens.

        h0 = xxh64(block 0)     h1 = xxh64(h0, block 1)     h2 = xxh64(h1, block 2)

    Keys and values depend on everything before them, so equal tokens after different prefixes must not be
    equal here.
    """
    return xxhash.xxh64_intdigest(content if parent is None else parent.to_bytes(8, "little") + content)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
