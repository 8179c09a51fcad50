"""What tells whether bytes are still those that were written: XXH3, 128 bits (Collet, https://github.com/Cyan4973/xxHash).

Owns: the hash. Must not know: what it is of.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

READ_BYTES = 8 << 20  # of a file, at a time


def checksum(array: np.ndarray) -> str:
    """Of an array's bytes in C order, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def file_checksum(file: Path) -> str:
    """Of a whole file, hexadecimal."""
    state, buffer = xxhash.xxh3_128(), bytearray(min(READ_BYTES, file.stat().st_size + 1))
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(view):
            state.update(view[:count])
    return state.hexdigest()
