"""What lives on the device between steps: the KV cache and each row's last token. Donated to every step.

Owns: shapes, dtypes, shardings and allocation of the state. Must not know: what a step does with it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.runtime.mesh import TP, sharding


@struct.dataclass
class KVCache:
    """kv [L, 2, N, Hkv, P, D]: layers, keys and values, blocks, kv heads (sharded), block size, head dim.

    One array, threaded through the layers and written in place; a (block, head) tile is contiguous.
    """

    kv: jax.Array


@struct.dataclass
class DeviceState:
    """cache, and last_tokens [max_num_seqs] int32: the last sampled token of each row, input of its next step."""

    cache: KVCache
    last_tokens: jax.Array


STATE_SPECS = DeviceState(
    cache=KVCache(kv=P(None, None, None, TP, None, None)),  # type: ignore[arg-type]
    last_tokens=P(None),  # type: ignore[arg-type]
)


def stored_kv_heads(model: ModelConfig, tp: int) -> int:
    """Key/value heads in the cache over all shards; fewer heads than shards are stored tp / heads times each."""
    return max(model.num_key_value_heads, tp)


def kv_block_bytes(model: ModelConfig, engine: EngineConfig, tp: int) -> int:
    """Bytes of one block on one device."""
    heads = stored_kv_heads(model, tp) // tp
    itemsize = jnp.dtype(engine.dtype).itemsize
    return 2 * model.num_hidden_layers * heads * engine.block_size * model.head_dim * itemsize


def state_shapes(model: ModelConfig, engine: EngineConfig, mesh: Mesh, num_blocks: int) -> DeviceState:
    """The state as ShapeDtypeStructs with shardings, for ahead-of-time compilation."""
    shape = (model.num_hidden_layers, 2, num_blocks, stored_kv_heads(model, mesh.size), engine.block_size,
             model.head_dim)  # fmt: skip
    kv = jax.ShapeDtypeStruct(shape, jnp.dtype(engine.dtype), sharding=sharding(mesh, (None, None, None, TP)))
    last = jax.ShapeDtypeStruct((engine.max_num_seqs,), jnp.int32, sharding=sharding(mesh))
    return DeviceState(cache=KVCache(kv=kv), last_tokens=last)  # type: ignore[arg-type]


def logits_shape(vocab_size: int, mesh: Mesh, num_seqs: int) -> jax.ShapeDtypeStruct:
    """[num_seqs, V] float32, sharded over the vocabulary, which is padded to a multiple of the shards."""
    padded = -(-vocab_size // mesh.size) * mesh.size
    return jax.ShapeDtypeStruct((num_seqs, padded), jnp.float32, sharding=sharding(mesh, (None, TP)))


def allocate_state[State](shapes: State) -> State:
    """Zeros of those shapes, a tree of ShapeDtypeStructs.

    Never uninitialised: an unused slot may be read under a mask, and 0 * NaN is NaN.
    """

    def zeros(leaf: Any) -> jax.Array:
        make = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)
        return make()

    return jax.tree.map(zeros, shapes)
