"""Lent host memory: used again, never beyond what was asked for, never by two at once."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from jaxvllm.config import ModelConfig
from jaxvllm.convert import files, load_shards
from jaxvllm.convert.load import Parts
from jaxvllm.convert.memory import ALIGNMENT, SMALL_BYTES, Lease, Memory
from jaxvllm.convert.pace import Pace
from jaxvllm.models.params import ParamInfo
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR

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


FOLDER = GOLDEN_DIR / "yarn_factor_4"


def loaded_at(pace: Pace, together: int) -> tuple[int, int, set[str]]:
    """(most parameters on their way at once, most bytes of more than one, threads that read); the first ones wait until
    `together` are on their way."""
    changed, now, most, most_bytes, names = threading.Condition(), list[int](), 0, 0, set[str]()
    before = os.preadv

    def preadv(*args: Any) -> int:
        names.add(threading.current_thread().name)
        return before(*args)

    def place(info: ParamInfo, read: Parts) -> None:
        nonlocal most, most_bytes
        num_bytes = info.size * 4
        with changed:
            now.append(num_bytes)
            most, most_bytes = max(most, len(now)), max(most_bytes, sum(now) if len(now) > 1 else 0)
            changed.notify_all()
            assert changed.wait_for(lambda: most >= together, timeout=30)
        read(tuple(slice(0, n) for n in info.shape))
        time.sleep(0.01)
        with changed:
            now.remove(num_bytes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        patched.setattr(files, "SMALL_BYTES", 1)
        load_shards(FOLDER, param_table(ModelConfig.from_dir(FOLDER)), dtype="float32", place=place, pace=pace)
    return most, most_bytes, {name for name in names if name.startswith("read")}


@pytest.mark.parametrize("parameters", [1, 3, 8])
def test_so_many_parameters_are_on_their_way_and_so_many_threads_read(parameters: int) -> None:
    most, _, readers = loaded_at(Pace(parameters=parameters, readers=2), parameters)
    assert most == parameters
    assert 1 <= len(readers) <= 2


def test_together_they_stay_within_the_memory_of_the_pace() -> None:
    table = param_table(ModelConfig.from_dir(FOLDER))
    sizes = [info.size * 4 for info in table.values()]
    two = 2 * max(sizes)
    most, most_bytes, _ = loaded_at(Pace(parameters=8, memory_bytes=two), 2)
    assert most > 1 and most_bytes <= two < sum(sizes[:8])  # 8 at once would be more
    assert loaded_at(Pace(parameters=8, memory_bytes=0), 1)[0] == 1


@pytest.mark.parametrize(
    "wrong",
    [{"parameters": 0}, {"readers": 0}, {"memory_bytes": -1}, {"readers": 1.5}, {"parameters": None},
     {"memory_bytes": float("nan")}],
)  # fmt: skip
def test_an_impossible_pace_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be a whole number of at least"):
        Pace(**wrong)
