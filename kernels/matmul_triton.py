"""Backend "triton", products whose every row is the same whatever rows are beside it: for a batch-invariant engine.

Work of one program: a tile of the output, `rows` by `columns`. It walks the whole inner dimension from its start, in
steps of `inner`, into one float32 accumulator: no split, no second order of summation. The tile depends on the weight
alone, never on the number of rows, so every row goes through the same instructions; rows past the last one repeat it
and are not stored. XLA's products don't have this: cuBLAS picks tiles and splits by shape.

    x        [T, K]   row tile    |-- inner 0 --|-- inner 1 --| ...     one after the other
    weight   [N, K]   column tile |-- inner 0 --|-- inner 1 --| ...
    programs          groups of GROUP row tiles by all column tiles, rows first: a weight tile is read once a group

Memory traffic: the weight once a group of row tiles (from L2 within one), x once a column tile (mostly from L2).
Supported: any T, K and N, float32 and bfloat16.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .triton_tiles import dot

GROUP = 8


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Tunables: the output tile, inner elements a step, warps, stages."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def matmul_config(columns: int, itemsize: int) -> MatmulConfig:
    """The untuned default for a weight of so many rows. It must not know how many rows x has."""
    if itemsize == 4:  # products without tensor cores: small tiles, or registers spill
        return MatmulConfig(rows=32, columns=32, inner=32, num_warps=4, num_stages=2)
    return MatmulConfig(rows=64, columns=64 if columns < 16384 else 128, inner=64, num_warps=4, num_stages=4)


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
    config: MatmulConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [T, K] times weight [N, K] transposed -> [T, N] in out_dtype; accumulated in float32."""
    (tokens, _), columns = x.shape, weight.shape[0]
    config = config or matmul_config(columns, x.dtype.itemsize)
    row_tiles, column_tiles = pl.cdiv(tokens, config.rows), pl.cdiv(columns, config.columns)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, row_tiles=row_tiles, column_tiles=column_tiles),
        grid=(row_tiles * column_tiles,),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.dtype(out_dtype)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="invariant_matmul",
    )(x, weight)


def _kernel(x_ref, weight_ref, out_ref, *, config: MatmulConfig, row_tiles: int, column_tiles: int):
    (tokens, size), columns = x_ref.shape, weight_ref.shape[0]
    row_tile, column_tile = _tile(pl.program_id(0), row_tiles, column_tiles)
    row = row_tile * config.rows + lax.broadcasted_iota(jnp.int32, (config.rows, 1), 0)
    column = column_tile * config.columns + lax.broadcasted_iota(jnp.int32, (config.columns, 1), 0)
    x_row, weight_row = jnp.minimum(row, tokens - 1), jnp.minimum(column, columns - 1)

    def step(index, acc):
        inner = index * config.inner + lax.broadcasted_iota(jnp.int32, (1, config.inner), 1)
        return acc + dot(_load(x_ref, x_row, inner, size), _load(weight_ref, weight_row, inner, size), trans_b=True)

    shape = (config.rows, config.columns)
    acc = lax.fori_loop(0, pl.cdiv(size, config.inner), step, jnp.zeros(shape, jnp.float32))
    row, column = jnp.broadcast_to(row, shape), jnp.broadcast_to(column.reshape(1, -1), shape)
    plgpu.store(out_ref.at[row, column], acc.astype(out_ref.dtype), mask=(row < tokens) & (column < columns))


def _load(ref, row: jax.Array, inner: jax.Array, size: int) -> jax.Array:
    """ref[row, inner] of row [R, 1] and inner [1, K]: [R, K], zeros from inner = size on."""
    shape = (row.shape[0], inner.shape[1])
    at = ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(inner, shape)]
    if size % shape[1] == 0:
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.broadcast_to(inner < size, shape), other=0.0)


def _tile(program: jax.Array, row_tiles: int, column_tiles: int) -> tuple[jax.Array, jax.Array]:
    """The program's row tile and column tile: GROUP row tiles by all column tiles, then the next ones."""
    group, within = lax.div(program, GROUP * column_tiles), lax.rem(program, GROUP * column_tiles)
    rows = jnp.minimum(GROUP, row_tiles - group * GROUP)
    return group * GROUP + lax.rem(within, rows), lax.div(within, rows)
