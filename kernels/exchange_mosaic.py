"""Backend "mosaic", sums over the shards of a mesh: one launch that also adds the residual and takes the norm.

Every shard has an exchange buffer that its peers may write to, over NVLink. A program takes one token. One shot: it
writes its row into every shard's buffer, waits until all rows of its own have come and adds them in the order of the
shards, the same bits everywhere (of two shards, the own row stays at home). Two shots, less to send with more than two
shards: rows go to shard t mod shards alone, which adds token t's and writes the sum to all, into its own place of the
same turn, which it has emptied by then. Then it goes on as `norm_triton` does.

There are no flags and no fences: a buffer is full of EMPTY words, no row has such a word (two bfloat16 zeros of
negative sign: they travel as zeros), and who reads a word puts EMPTY back ("Lamport" exchange, as in TensorRT-LLM).

    a shard's buffer  | turn 0: from shard 0, from shard 1, ... | turn 1: ... | turn 2: ... | pairs: from shard 0, ... |
                       each token's row of H values                                          each sequence's value, id

Two exchanges of one turn must have another between them: whose part in that one has come has emptied the first. The
layers of a step use turns 0 and 1, its last norm turn 2, so any step may follow any other. Programs wait for those of
the same token elsewhere: a GPU starts them in the order of their numbers, so the first that isn't done runs everywhere.

The buffers' addresses are an operand, which the host reads off the arrays: kernels with Pallas' remote refs meet those
of the other devices on the host before every launch, 20 us each, and stay outside the CUDA graph. For jax these are
ordinary kernels that read an array of addresses. Memory traffic: a row to each peer; x, the sum and the norm once.
Supported: bfloat16 and float32, rows that 128 threads share evenly (`vector_size`), 2 and more shards.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .exchange_layout import THREADS, vector_size
from .exchange_mosaic_words import Rows, exchange_pairs

SAVED_BYTES = 800_000  # what NVLink, at 400 GB/s, sends in the 2 us of another trip


def all_reduce_add_rms_norm(
    x: jax.Array,
    part: jax.Array,
    weights: jax.Array,
    row: int | jax.Array,
    peers: jax.Array,
    *,
    turn: int,
    capacity: int,
    eps: float,
    two_shots: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x, part [T, H], weights [R, H] -> (x + the sum of all shards' parts, its RMS norm * weights[row]), both [T, H].

    peers [1, 3 + 2 * shards] int32: this shard's number, the address of its buffer, those of all, low words first.
    turn: 0, 1 or 2, see above. capacity: the tokens that a buffer has room for. two_shots: None takes what sends in
    less time. Raises ValueError for a T beyond capacity and for rows that 128 threads can't share.
    """
    (tokens, size), shards = x.shape, num_shards(peers)
    if two_shots is None:
        # one shot sends T (n - 1) rows, two T (n - 1) * 2 / n: worth a second trip over NVLink from 800 kB saved on
        two_shots = tokens * size * x.dtype.itemsize * (shards - 1) * (shards - 2) > SAVED_BYTES * shards
    values = vector_size(size, x.dtype.itemsize)
    if tokens > capacity or values is None:
        raise ValueError(f"{tokens} tokens of {size} {x.dtype.name}: the buffers have room for {capacity}, and rows "
                         f"must be shared evenly by {THREADS} threads")  # fmt: skip
    return _launch(jnp.asarray(row, jnp.int32).reshape(1), peers, x, part, weights, turn=turn, capacity=capacity,
                   eps=eps, two_shots=two_shots)  # fmt: skip


def num_shards(peers: jax.Array) -> int:
    """Of the mesh that a table of addresses is for."""
    return (peers.shape[1] - 3) // 2


@functools.partial(jax.jit, static_argnames=("turn", "capacity", "eps", "two_shots"))  # lowered once for all layers
def _launch(row, peers, x, part, weights, *, turn: int, capacity: int, eps: float, two_shots: bool):
    tokens, size = x.shape
    layout = plgpu.Layout.WG_STRIDED((size,), vector_size(size, x.dtype.itemsize))
    shards = num_shards(peers)

    def kernel(row_ref, peers_ref, x_ref, part_ref, weights_ref, sum_ref, norm_ref):
        token = lax.axis_index("token")

        @plgpu.inline_mgpu(
            arg_types=(layout, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout),
        )
        def exchange(_, *refs):
            rows = Rows(*refs, turn=turn, capacity=capacity, shards=shards)
            return rows.two_shots() if two_shots else rows.one_shot()

        own = plgpu.load(part_ref.at[token], layout=layout)
        before = plgpu.load(x_ref.at[token], layout=layout).astype(jnp.float32)
        weight = plgpu.load(weights_ref.at[row_ref[0]], layout=layout).astype(jnp.float32)
        delta = exchange(own, peers_ref).astype(x.dtype).astype(jnp.float32)  # rounded as a whole product is
        total = (before + delta).astype(x.dtype)
        sum_ref[token] = total
        wide = total.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        norm_ref[token] = ((wide * scale).astype(x.dtype).astype(jnp.float32) * weight).astype(x.dtype)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(
        kernel,
        out_type=(shape, shape),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=512, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="all_reduce_add_rms_norm",
    )(row, peers, x, part, weights)


def best_of_shards(values: jax.Array, ids: jax.Array, peers: jax.Array, *, offset: int, max_seqs: int) -> jax.Array:
    """values [B] float32, ids [B] int32, one candidate of each shard -> the id of the largest, the lowest of equals.

    The same [B] on all shards. offset: where the buffers' pairs begin, for max_seqs sequences (`pairs_offset`).
    """
    batch, shards = values.shape[0], num_shards(peers)

    def kernel(peers_ref, values_ref, ids_ref, out_ref):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        def exchange(_, *refs):
            exchange_pairs(*refs, shards=shards, offset=offset, max_seqs=max_seqs)

        exchange(peers_ref, values_ref, ids_ref, out_ref)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch,), jnp.int32),
        grid=(pl.cdiv(batch, THREADS),),
        grid_names=("part",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="best_of_shards",
    )(peers, values, ids)
