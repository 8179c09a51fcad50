"""Backend "triton", sampling: the arg-max of logits plus scaled Gumbel noise in one pass over the logits.

The noise is made where it is needed and never written. Work of one program: one row and `chunk` consecutive ids, in
tiles of four runs of LANES ids that share a call of the generator (see `noise`). Each lane keeps its own best; the
lanes are compared once at the end, and a small reduction over the row's programs follows. A greedy row makes no noise.

Memory traffic: the logits once. Arithmetic, about 40 instructions an id, is of the same order: the generator is the
cheap one, and the two logarithms are the hardware's (absolute error below 1e-5 in the noise, where `gumbel_from_bits`
has 1e-6).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .device import num_sms
from .noise import LANES, WORDS, mulhi, philox4x32

TILE = WORDS * LANES
LN2 = 0.6931471805599453
NO_ID = 0x7FFFFFFF


def gumbel_argmax(
    logits: jax.Array,
    temperatures: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    start: jax.Array,
    *,
    vocab_size: int,
    tiles: int | None = None,
    lows: jax.Array | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The best (value [B] float32, global id [B] int32) of logits [B, V] float32 whose first column is id `start`.

    lows [B]: lower logits don't take part.
    """
    rows, size = logits.shape
    all_tiles = pl.cdiv(size + TILE - 1, TILE)  # start may lie anywhere in a tile
    if tiles is None:
        tiles = max(1, min(8, rows * all_tiles // (8 * num_sms())))
    programs = pl.cdiv(all_tiles, tiles)
    part = (rows, programs)
    values, ids = pl.pallas_call(
        functools.partial(_kernel, vocab_size=vocab_size, tiles=tiles, interpret=interpret),
        grid=(programs, rows),
        out_shape=(jax.ShapeDtypeStruct(part, jnp.float32), jax.ShapeDtypeStruct(part, jnp.int32)),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gumbel_argmax",
    )(
        jnp.asarray(start, jnp.int32).reshape(1),
        temperatures,
        seeds,
        positions,
        logits,
        *([] if lows is None else [lows]),
    )
    return lax.reduce((values, ids), (jnp.float32(-jnp.inf), jnp.int32(NO_ID)), _better, (1,))


def _better(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The larger value with its id; of equals, the lower id."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def _kernel(start_ref, temperatures_ref, seeds_ref, positions_ref, logits_ref, *refs,
            vocab_size: int, tiles: int, interpret: bool):  # fmt: skip
    *lows_ref, value_ref, id_ref = refs
    program, row = pl.program_id(0), pl.program_id(1)
    low = lows_ref[0][row] if lows_ref else None
    start, size = start_ref[0], logits_ref.shape[1]
    end = jnp.minimum(start + size, vocab_size)
    first_tile = lax.div(start, TILE) + program * tiles
    temperature = jnp.minimum(temperatures_ref[row], 1e30)  # beyond, logits are nothing beside the noise
    key = seeds_ref[row, 0], seeds_ref[row, 1]
    position = positions_ref[row].astype(jnp.uint32)
    lane = lax.iota(jnp.int32, LANES)

    def scan(noisy: bool) -> None:
        def step(index, state):
            tile = first_tile + index
            words = None
            if noisy:
                counter = (tile * LANES + lane).astype(jnp.uint32)
                zero = jnp.zeros((LANES,), jnp.uint32)
                every = jnp.full((LANES,), position, jnp.uint32)
                words = philox4x32(key, (counter, every, zero, zero), functools.partial(_mulhi, interpret=interpret))
            value, best = state
            for word in range(WORDS):
                ids = tile * TILE + word * LANES + lane
                mine = (ids >= start) & (ids < end)
                column = jnp.where(mine, ids - start, 0)
                new = plgpu.load(logits_ref.at[row, column], mask=mine, other=-jnp.inf)
                if low is not None:
                    new = jnp.where(new >= low, new, -jnp.inf)
                if words is not None:
                    new = new + temperature * _gumbel(words[word], interpret)
                better = new > value  # ids rise, so of equals the lowest stays; a NaN never wins
                value, best = jnp.where(better, new, value), jnp.where(better, ids, best)
            return value, best

        nothing = jnp.maximum(first_tile * TILE + lane, start)
        state = (jnp.full((LANES,), -jnp.inf, jnp.float32), nothing)
        value, best = lax.fori_loop(0, tiles, step, state)
        top = jnp.max(value)
        value_ref[row, program] = top
        id_ref[row, program] = jnp.min(jnp.where(value == top, best, NO_ID))

    @pl.when(temperature > 0)
    def _sampled():
        scan(noisy=True)

    @pl.when(temperature <= 0)
    def _greedy():
        scan(noisy=False)


def _gumbel(bits: jax.Array, interpret: bool) -> jax.Array:
    """`gumbel_from_bits` through the hardware's base-2 logarithm, with a series where 1 - u would round."""
    u = _to_float(bits, interpret) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    u = jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = jnp.where(u < 2.0**-5, series, -LN2 * _log2(1 - u, interpret))
    return -LN2 * _log2(exponential, interpret)


def _to_float(bits: jax.Array, interpret: bool) -> jax.Array:
    if interpret:
        return bits.astype(jnp.float32)
    return _asm("cvt.rn.f32.u32 $0, $1;", "=f,r", jnp.float32, bits)


def _log2(x: jax.Array, interpret: bool) -> jax.Array:
    return jnp.log2(x) if interpret else _asm("lg2.approx.f32 $0, $1;", "=f,f", jnp.float32, x)


def _mulhi(x: jax.Array, y: jax.Array, interpret: bool) -> jax.Array:
    if interpret:
        return mulhi(x, y)
    return _asm("mul.hi.u32 $0, $1, $2;", "=r,r,r", jnp.int32, x, jnp.broadcast_to(y, x.shape)).astype(jnp.uint32)


def _asm(code: str, constraints: str, dtype: jax.typing.DTypeLike, *args: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.dtype(dtype))
    (out,) = plgpu.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=[shape])
    return out
