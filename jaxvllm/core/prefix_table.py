"""From the hash of a whole prefix to a block that holds its last tokens; and which prefixes are on their way.

Owns the two mappings. Must not know how hashes are made or what a block's state is. Two blocks may hold the same
content, because two requests computed it at the same time; the two tables differ in whose entry counts.
"""

from __future__ import annotations

from collections.abc import Iterator


class LastPublisher:
    """One block for each hash: the one published last. When it is taken the entry goes, though a copy may live on."""

    def __init__(self) -> None:
        self._block: dict[int, int] = {}

    def get(self, key: int) -> int | None:
        """The block to use for this prefix, if any."""
        return self._block.get(key)

    def add(self, key: int, block: int) -> None:
        """`block` holds it now."""
        self._block[key] = block

    def drop(self, key: int, block: int) -> None:
        """`block`, which held it, is about to be overwritten."""
        if self._block.get(key) == block:
            del self._block[key]

    def items(self) -> Iterator[tuple[int, int]]:
        """(hash, block), each block that can be found."""
        return iter(self._block.items())


class AllPublishers:
    """All blocks of a hash, oldest first: the oldest is the one to use, and its copies take over when it goes."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}

    def get(self, key: int) -> int | None:
        """The block to use for this prefix, if any."""
        blocks = self._blocks.get(key)
        return None if blocks is None else blocks[0]

    def add(self, key: int, block: int) -> None:
        """`block` holds it now, too."""
        blocks = self._blocks.setdefault(key, [])
        if block not in blocks:
            blocks.append(block)

    def drop(self, key: int, block: int) -> None:
        """`block`, which held it, is about to be overwritten."""
        blocks = self._blocks.get(key, [])
        if block in blocks:
            blocks.remove(block)
            if not blocks:
                del self._blocks[key]

    def items(self) -> Iterator[tuple[int, int]]:
        """(hash, block), each block that holds something."""
        return ((key, block) for key, blocks in self._blocks.items() for block in blocks)


class Expected:
    """Prefixes that are being computed: their writers will publish them, unless they stop before."""

    def __init__(self) -> None:
        self._writer: dict[int, int] = {}  # hash -> who computes it
        self._hashes: dict[int, list[int]] = {}  # who -> what it has promised

    def __contains__(self, key: int) -> bool:
        return key in self._writer

    def add(self, keys: list[int], writer: int) -> None:
        """`writer` (any number that tells writers apart) computes these. What somebody else computes stays that one's:
        a second copy is nothing to wait for."""
        mine = [key for key in keys if key not in self._writer]
        self._writer.update(dict.fromkeys(mine, writer))
        self._hashes.setdefault(writer, []).extend(mine)

    def fulfil(self, key: int) -> None:
        """It is published, by whomever."""
        self._writer.pop(key, None)

    def drop(self, writer: int) -> None:
        """What `writer` hasn't published by now it won't."""
        for key in self._hashes.pop(writer, ()):
            if self._writer.get(key) == writer:
                del self._writer[key]

    def clear(self) -> None:
        self._writer.clear()
        self._hashes.clear()
