"""The order in which free blocks are taken: two of them, one for each policy.

Owns that order and nothing else. A block that comes back is "known" if it has a hash by which its content may be found:
to take it loses something, to take an unknown one doesn't. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class FreeList:
    """First in, first out: what was given back last survives longest as a cached prefix, known or not.

    Close to LRU. Another order is a subclass with its own `push`.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)

    def pop(self) -> int:
        """Remove and return the next block to be taken."""
        return self._order.popitem(last=False)[0]

    def push(self, blocks: list[int], known: list[bool]) -> None:
        """`blocks` of one request have no holder any more, in the order in which it gives them back."""
        self._order.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        """`block` is revived from wherever it stands."""
        del self._order[block]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be taken."""
        return iter(self._order)


class KnownLast(FreeList):
    """Unknown blocks to the front, known ones to the back: a cached prefix is lost only when nothing else is free.

        given back: 7 (unknown)  6 (unknown)  5 (known)  4 (known)
        free list:  front  7 6 | ... what was free before ... | 5 4  back

    vLLM V1's order.
    """

    def push(self, blocks: list[int], known: list[bool]) -> None:
        unknown = [block for block, is_known in zip(blocks, known, strict=True) if not is_known]
        self._order.update((block, None) for block, is_known in zip(blocks, known, strict=True) if is_known)
        for block in reversed(unknown):
            self._order[block] = None
            self._order.move_to_end(block, last=False)
