"""The processors' state counts in the memory budget, to the byte."""

from __future__ import annotations

import jax
import pytest

from jaxvllm.runtime.mesh import make_mesh
from jaxvllm.runtime.processors import processor_bytes, processor_shapes
from jaxvllm.runtime.state import allocate_state


@pytest.mark.parametrize("shards", [1, 4])
def test_bytes_on_each_device(shards: int) -> None:
    mesh = make_mesh(shards)
    state = allocate_state(processor_shapes(mesh, 3, 331))
    for device in mesh.devices.flat:
        held = [shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
                if shard.device == device]  # fmt: skip
        assert sum(held) == processor_bytes(3, 331, shards)
