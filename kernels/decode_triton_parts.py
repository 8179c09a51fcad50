"""The end of decode_triton: the parts that the splits of a context have left become one row."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

PARTS_AT_ONCE = 16  # [16, D] float32 in registers


def combine(out_ref, token, part_ref, weight_ref, seq, num_splits, max_splits: int, query_head) -> None:
    """Row `token` of the output: the mean of the parts of a sequence's query head under their base-2 log weights."""
    size = min(PARTS_AT_ONCE, max_splits)

    def step(index, state):
        top, total, acc = state
        split = index * size + lax.iota(jnp.int32, size)
        used = split < num_splits
        log = plgpu.load(weight_ref.at[seq, query_head, split], mask=used, other=-jnp.inf)
        ref = part_ref.at[seq, query_head, pl.ds(index * size, size), :]
        parts = plgpu.load(ref, mask=used[:, None], other=0.0)  # in flight together with the weights
        new_top = jnp.maximum(top, jnp.max(log))
        weights, fade = jnp.exp2(log - new_top), jnp.exp2(top - new_top)
        return new_top, total * fade + jnp.sum(weights), acc * fade + jnp.sum(parts * weights[:, None], axis=0)

    #  finite from the start, also for an empty context
    state = (jnp.float32(-1e30), jnp.float32(0), jnp.zeros((part_ref.shape[3],), jnp.float32))
    state = step(0, state)
    _, total, acc = lax.fori_loop(1, pl.cdiv(num_splits, size), step, state)
    out_ref[token, query_head, :] = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
