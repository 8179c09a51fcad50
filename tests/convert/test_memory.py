"""Lent host memory: used again, never beyond what was asked for, never by two at once."""

from __future__ import annotations

import numpy as np
import pytest

from jaxvllm.convert.memory import ALIGNMENT, SMALL_BYTES, Lease, Memory

MB = 1 << 20


def test_a_buffer_is_used_again() -> None:
    memory = Memory(8 * MB)
    with Lease(memory) as lease:
        first = lease.empty((3 * MB,), np.dtype(np.uint8))
        first[:] = 7
    with Lease(memory) as lease:
        again = lease.empty((MB, 2), np.dtype(np.uint8))
        assert again.base is not None and np.shares_memory(first, again) and (again == 7).all()
        assert again.ctypes.data % ALIGNMENT == 0


def test_no_buffer_has_two_borrowers() -> None:
    memory = Memory(64 * MB)
    with Lease(memory) as one, Lease(memory) as other:
        arrays = [lease.empty((2 * MB,), np.dtype(np.uint8)) for lease in (one, other, one, other)]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


@pytest.mark.parametrize("keep", [0, 5 * MB, 20 * MB])
def test_what_is_kept_is_bounded(keep: int) -> None:
    """In any order of sizes, also after one array that is larger than all that may be kept."""
    rng = np.random.default_rng(keep)
    memory, leases = Memory(keep), list[tuple[Lease, int]]()
    for turn in range(300):
        if leases and rng.random() < 0.5:
            leases.pop(int(rng.integers(len(leases))))[0].end()
        else:
            size, lease = int(rng.integers(SMALL_BYTES, 6 * MB)) if turn % 50 else 30 * MB, Lease(memory)
            lease.empty((size,), np.dtype(np.uint8))
            leases.append((lease, size))
        assert memory.kept_bytes == 0 or memory.kept_bytes + sum(size for _, size in leases) <= keep
    for lease, _ in leases:
        lease.end()
    assert memory.kept_bytes <= keep
