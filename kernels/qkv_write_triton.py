"""Backend "triton", from the qkv projection to attention's operands in one launch a layer: qk-norm (or none), rotary
embedding, and the keys and values into their cache slots, in place.

One program handles one token: every lane (G query heads, key, value) of all its kv heads, each head as two halves of
head_dim, the pairs that the rotation turns. Memory traffic: the projection read once, queries, keys and values written
once; the norm weights come stacked over the layers, since a slice would be a copy of its own. Supported: any even
head_dim, head count and block size, float32 and bfloat16. Kept slots must be unique; slots outside 0..N*P-1 are dropped
(their queries are written all the same).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .triton_tiles import as_rows, next_power_of_two


def qk_norm_rope_write(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    slot_mapping: jax.Array,
    *,
    eps: float,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """qkv [T, Hkv, G + 2, D], norms [L, D] -> (queries [T, Hkv * G, D], kv with keys and values at slot_mapping)."""
    return _launch(qkv, (q_norm, k_norm), cos, sin, kv, layer, slot_mapping, eps, num_warps, interpret)


def rope_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: int | jax.Array,
    slot_mapping: jax.Array,
    *,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The same for families without a norm on heads."""
    return _launch(qkv, (), cos, sin, kv, layer, slot_mapping, 0.0, num_warps, interpret)


def _launch(
    qkv, norms: tuple[jax.Array, ...], cos, sin, kv, layer, slot_mapping, eps: float, num_warps: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    tokens, kv_heads, lanes, head_dim = qkv.shape
    rows = as_rows(kv)
    queries, out = pl.pallas_call(
        functools.partial(_qkv_kernel, eps=eps),
        grid=(tokens,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads, lanes - 2, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        ),
        input_output_aliases={5 + len(norms): 1},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="qk_norm_rope_write" if norms else "rope_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), slot_mapping, qkv, *norms, cos, sin, rows)
    return queries.reshape(tokens, kv_heads * (lanes - 2), head_dim), out.reshape(kv.shape)


def _qkv_kernel(layer_ref, slots_ref, qkv_ref, *refs, eps):
    *norms, cos_ref, sin_ref, _, q_ref, kv_ref = refs
    q_norm_ref, k_norm_ref = norms or (None, None)
    token = pl.program_id(0)
    _, heads, lanes, head_dim = qkv_ref.shape
    num_blocks, block_size = kv_ref.shape[1], kv_ref.shape[3]
    half = head_dim // 2
    layer = layer_ref[0]
    shape = (next_power_of_two(heads), next_power_of_two(half))
    head = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    exists = (head < heads) & (column < half)
    pair = lax.iota(jnp.int32, shape[1])
    cos, sin = (plgpu.load(r.at[token, pair], mask=pair < half, other=0.0)[None, :] for r in (cos_ref, sin_ref))

    def load(lane: int) -> list[jax.Array]:
        return [
            plgpu.load(qkv_ref.at[token, head, lane, column + part * half], mask=exists, other=0.0) for part in (0, 1)
        ]

    def rotated(lane: int, norm_ref) -> tuple[jax.Array, jax.Array]:
        dtype = qkv_ref.dtype
        x = [value.astype(jnp.float32) for value in load(lane)]
        left, right = x if norm_ref is None else normed(x, norm_ref, dtype)
        return (left * cos - right * sin).astype(dtype), (right * cos + left * sin).astype(dtype)

    def normed(x: list[jax.Array], norm_ref, dtype) -> list[jax.Array]:
        mean = (jnp.sum(x[0] * x[0], axis=1) + jnp.sum(x[1] * x[1], axis=1))[:, None] / head_dim
        scale = lax.rsqrt(mean + eps)
        weights = [
            plgpu.load(norm_ref.at[layer, pair + part * half], mask=pair < half, other=0.0)[None, :].astype(jnp.float32)
            for part in (0, 1)
        ]
        # rounded where the unfused layers round: after the norm, and after its weight
        return [
            ((value * scale).astype(dtype).astype(jnp.float32) * weight).astype(dtype).astype(jnp.float32)
            for value, weight in zip(x, weights, strict=True)
        ]

    for lane in range(lanes - 2):
        for part, value in enumerate(rotated(lane, q_norm_ref)):
            plgpu.store(q_ref.at[token, head, lane, column + part * half], value, mask=exists)

    slot = slots_ref[token]
    kept = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(kept, slot, 0)  # indices are cast to unsigned: never negative, even where masked
    block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
    for which, halves in enumerate((rotated(lanes - 2, k_norm_ref), load(lanes - 1))):
        for part, value in enumerate(halves):
            target = kv_ref.at[2 * layer + which, block, head, offset, column + part * half]
            plgpu.store(target, value, mask=exists & kept)
