"""Backend "triton", KV write: the step's keys and values into their cache slots, in place, in one launch.

One program writes one token: [Hkv, D] keys and values, each head's row into another (block, head) tile. The
cache is an aliased operand (input_output_aliases), so a donated cache isn't copied and nothing else of it is
touched. Memory traffic: k and v read once and written once. Supported: any head_dim, head count and block
size, float32 and bfloat16. Kept slots must be unique; slots outside 0..N*P-1 are dropped.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .triton_tiles import as_rows, next_power_of_two


def write_kv(
    kv: jax.Array,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    num_warps: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """kv [L, 2, N, Hkv, P, D] with k[t], v[t] [Hkv, D] at slot slot_mapping[t]."""
    rows = as_rows(kv)
    out = pl.pallas_call(
        _write_kernel,
        grid=slot_mapping.shape,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="paged_kv_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), slot_mapping, k, v, rows)
    return out.reshape(kv.shape)


def _write_kernel(layer_ref, slots_ref, k_ref, v_ref, _, kv_ref):
    token = pl.program_id(0)
    _, num_blocks, heads, block_size, head_dim = kv_ref.shape
    shape = (next_power_of_two(heads), next_power_of_two(head_dim))
    head = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    exists = (head < heads) & (column < head_dim)
    slot = slots_ref[token]
    kept = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(kept, slot, 0)  # indices are cast to unsigned: never negative, even where masked
    block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
    layer = layer_ref[0]
    for part, ref in enumerate((k_ref, v_ref)):
        value = plgpu.load(ref.at[token, head, column], mask=exists, other=0.0)
        plgpu.store(kv_ref.at[2 * layer + part, block, head, offset, column], value, mask=exists & kept)
