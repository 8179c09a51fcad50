"""The buffers through which the shards of a mesh add up their parts without leaving the compiled step.

Owns: when that is possible, the buffers' size, allocation and addresses. Must not know: how rows travel
(kernels/exchange_mosaic), what is added.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.kernels import ResolvedBackends, best_of_shards
from jaxvllm.kernels.exchange_layout import EMPTY, buffer_bytes, pairs_offset, vector_size
from jaxvllm.runtime.mesh import TP, sharding

logger = logging.getLogger(__name__)

MAX_BUFFER_BYTES = 1 << 30  # of each shard


@struct.dataclass
class Exchange:
    """buffers [shards, words] uint32, of which jax knows only that steps need them; peers [shards, 3 + 2 * shards].

    Kernels have the buffers' addresses from peers (``exchange_mosaic``). capacity, max_seqs: how many tokens and
    sequences they have room for; pairs: where the sequences' part begins, in bytes.
    """

    buffers: jax.Array
    peers: jax.Array
    capacity: int = struct.field(pytree_node=False)
    max_seqs: int = struct.field(pytree_node=False)
    pairs: int = struct.field(pytree_node=False)

    def best_of_shards(self, values: jax.Array, ids: jax.Array) -> jax.Array:
        """See ``kernels.best_of_shards``; on local shapes, inside a step."""
        return best_of_shards(values, ids, self.peers, offset=self.pairs, max_seqs=self.max_seqs)


def make_exchange(mesh: Mesh, model: ModelConfig, engine: EngineConfig, backends: ResolvedBackends) -> Exchange | None:
    """For the steps of an engine, or None where XLA's all-reduces have to do: one line in the log says why."""
    if mesh.size == 1:
        return None
    reason = refusal(mesh, model, engine, backends)
    if reason:
        logger.info("all-reduce: XLA's, because %s", reason)
        return None
    itemsize = jnp.dtype(engine.dtype).itemsize
    row_bytes = model.hidden_size * itemsize
    room = (MAX_BUFFER_BYTES - buffer_bytes(mesh.size, 0, row_bytes, engine.max_num_seqs)) // (
        buffer_bytes(mesh.size, 1, row_bytes, 0)
    )
    capacity = min(max(engine.max_num_batched_tokens, engine.max_num_seqs), room)
    exchange = allocate_exchange(mesh, row_bytes, capacity, engine.max_num_seqs)
    logger.info("all-reduce: in the norms' kernels, for steps of up to %d tokens (%.2f GB on each device)", capacity,
                exchange.buffers.nbytes / mesh.size / 1e9)  # fmt: skip
    return exchange


def allocate_exchange(mesh: Mesh, row_bytes: int, capacity: int, max_seqs: int) -> Exchange:
    """Buffers on every device of the mesh, all empty."""
    words = -(-buffer_bytes(mesh.size, capacity, row_bytes, max_seqs) // 4)
    axes = (TP, None)
    make = jax.jit(lambda: jnp.full((mesh.size, words), EMPTY, jnp.uint32), out_shardings=sharding(mesh, axes))
    buffers = jax.block_until_ready(make())  # on all devices, before a peer writes
    addresses = {shard.device: shard.data.unsafe_buffer_pointer() for shard in buffers.addressable_shards}
    ordered = [addresses[device] for device in mesh.devices.flat]
    pairs = pairs_offset(mesh.size, capacity, row_bytes)
    peers = jax.device_put(address_table(ordered), sharding(mesh, axes))
    return Exchange(buffers=buffers, peers=peers, capacity=capacity, max_seqs=max_seqs, pairs=pairs)  # type: ignore[call-arg]


def address_table(addresses: list[int]) -> np.ndarray:
    """int32 [shards, 3 + 2 * shards]: each shard's number, its own address and all, every address as low, high word."""
    halves = [(address & 0xFFFFFFFF, address >> 32) for address in addresses]
    rows = [(number, *own, *(word for pair in halves for word in pair)) for number, own in enumerate(halves)]
    return np.array(rows, np.uint32).view(np.int32)


def refusal(mesh: Mesh, model: ModelConfig, engine: EngineConfig, backends: ResolvedBackends) -> str:
    """Why the shards of a mesh can't write to each other's buffers, or ""."""
    devices = list(mesh.devices.flat)
    if engine.disable_custom_all_reduce:
        return "disable_custom_all_reduce=True"
    if backends.invariant:
        return "batch_invariant=True adds the shards' parts in its own way"
    if wrong := wrong_device(devices):
        return wrong
    if backends.fused != "triton":
        return f"it is part of the fused kernels, which attention_backend={engine.attention_backend!r} doesn't use"
    if any(device.process_index != jax.process_index() for device in devices):
        return "the mesh spans processes"
    if vector_size(model.hidden_size, jnp.dtype(engine.dtype).itemsize) is None:
        return f"hidden_size={model.hidden_size} can't be shared evenly by the threads of a row"
    if not devices_reach_each_other(devices):
        return "the devices can't write to each other's memory (no NVLink or peer access)"
    return ""


def wrong_device(devices: Sequence[Any]) -> str:
    """Why the kernels can't run on these devices, which are of one kind, or ""."""
    capability = str(getattr(devices[0], "compute_capability", ""))
    if devices[0].platform == "gpu" and capability == "9.0":
        return ""
    where = f"{devices[0].device_kind} has {capability}" if capability else f"the platform is {devices[0].platform}"
    return f"the kernels need compute capability 9.0, but {where}"


def devices_reach_each_other(devices: Sequence[Any], driver: Any = None) -> bool:
    """Whether each CUDA device may use the memory of each other; jax switches it on where it can be."""
    ordinals = [device.local_hardware_id for device in devices]
    try:
        cuda = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    except OSError:
        return False
    for one in ordinals:
        for other in ordinals:
            can = ctypes.c_int(0)
            if one != other and (cuda.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) or not can.value):
                return False
    return True
