"""Parts of parameters onto the devices of a mesh: which parts are asked for, and where they end up."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm.models.params import Index, ParamInfo, Source
from jaxvllm.runtime.mesh import TP, make_mesh
from jaxvllm.runtime.weights import make_place

WHOLE = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)


def info_of(*axes: str | None) -> ParamInfo:
    return ParamInfo("w", WHOLE.shape, axes, 0.02, (Source("w", WHOLE.shape, (slice(None), slice(None))),))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("axes", [(TP, None), (None, None), ()])
def test_every_device_gets_its_part_and_none_is_read_twice(size: int, axes: tuple[str | None, ...]) -> None:
    asked = []

    class Parts:
        dtype = WHOLE.dtype

        def __call__(self, index: Index) -> np.ndarray:
            asked.append(index)
            return np.ascontiguousarray(WHOLE[index])

        def stream(self, index: Index, send: Any) -> bool:
            raise AssertionError("nothing to stream with")

    mesh = make_mesh(size)
    placed = make_place(mesh)(info_of(*axes), Parts())
    parts = size if TP in axes else 1
    assert len(asked) == parts
    assert np.array_equal(placed, WHOLE)
    assert placed.committed and placed.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(*axes)), 2)
    for shard in placed.addressable_shards:
        assert shard.data.shape == (8 // parts, 6) and np.array_equal(shard.data, WHOLE[shard.index])
