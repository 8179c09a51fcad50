"""Backend "triton", filters: the logit from which a row's tokens stay under min_p, top_k and top_p, without a sort.

Work of one program: one row, read several times. The first pass finds its largest and smallest logit. Then each pass
compares every logit with a few candidates between two bounds at once, and counts (top_k) or weighs (top_p) what lies
above each: the bounds close in on the threshold. At first candidates divide the range of values evenly, later that of
the floats' bits, which can't take longer than all bits. A search ends as soon as it is decided: when exactly k logits
are kept, or one is left between the bounds; a row of 151,936 takes about half the passes that all bits would need.
Rows without a filter aren't read.

Memory traffic: the row once a pass. More candidates make fewer passes and need more registers for their sums, which
leaves no room for two programs on a multiprocessor: COUNTED and WEIGHED are the fastest pair measured (H200, 256 rows
of 151,936: 0.29 ms for top_k, 0.61 for all three; 15 and 7 candidates 0.45 and 0.86). Sums are in a fixed order.
Supported: any size, float32 without NaN.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .float_order import float_key, key_float
from .precision import LOG2_E

NUM_WARPS = 16
COLUMNS = NUM_WARPS * 128  # four logits of a thread lie together
ROWS = 4  # so many times: one thread's, so that they are summed without its neighbours
COUNTED, WEIGHED = 7, 3
BY_VALUE = 4  # passes


def filter_threshold(
    logits: jax.Array,
    temperatures: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    log_min_p: jax.Array,
    *,
    counted: int = COUNTED,
    weighed: int = WEIGHED,
    interpret: bool = False,
) -> jax.Array:
    """float32 [B]: of logits [B, V] those at or above it stay; -inf: all. See `kernels.filter_threshold`."""
    kernel = functools.partial(_kernel, size=logits.shape[1], counted=counted, weighed=weighed)
    scales = jnp.where(temperatures > 0, temperatures, 1.0)
    factors = LOG2_E / jnp.minimum(scales, 1e37)  # a smaller one is flushed to 0, and 0 * inf is no weight
    return pl.pallas_call(
        kernel,
        grid=(logits.shape[0],),
        out_shape=jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="filter_threshold",
    )(factors, top_k, top_p, scales * log_min_p, logits)


def _kernel(factors_ref, top_k_ref, top_p_ref, depths_ref, logits_ref, low_ref, *,
            size: int, counted: int, weighed: int):  # fmt: skip
    row = pl.program_id(0)
    factor, wanted, share, depth = (ref[row] for ref in (factors_ref, top_k_ref, top_p_ref, depths_ref))
    lowest = jnp.max(_full(-jnp.inf))  # jax 0.11.2 lowers no scalar select with a literal
    cuts = (wanted > 0) & (wanted < size)
    filters = cuts | (share < 1) | (depth > lowest)
    low_ref[row] = lowest

    def sweep(look: Callable, state):
        """Folds look(logits [ROWS, COLUMNS], state) over the row."""

        def one(index, state):
            tile = index * (ROWS * COLUMNS)
            column = tile + lax.iota(jnp.int32, ROWS)[:, None] * COLUMNS + lax.iota(jnp.int32, COLUMNS)[None, :]
            return look(plgpu.load(logits_ref.at[row, column], mask=column < size, other=-jnp.inf), state)

        return lax.fori_loop(0, pl.cdiv(size, ROWS * COLUMNS), one, state)

    @pl.when(filters)
    def _filter():
        def extremes(x, state):
            high, least, number = state
            exists = x > -jnp.inf
            return (
                jnp.maximum(high, jnp.max(x, axis=0)),
                jnp.minimum(least, jnp.min(jnp.where(exists, x, jnp.inf), axis=0)),
                number + jnp.sum(exists.astype(jnp.int32), axis=0),
            )

        high, least, number = sweep(extremes, (_full(-jnp.inf), _full(jnp.inf), _full(0)))
        peak, least, number = jnp.max(high), jnp.min(least), jnp.sum(number)
        low = jnp.where(depth > lowest, peak + depth, lowest)

        def count(values: list, needed):
            def look(x, sums):
                return tuple(s + jnp.sum((x >= v).astype(jnp.int32), axis=0) for s, v in zip(sums, values, strict=True))

            counts = [jnp.sum(s) for s in sweep(look, tuple(_full(0) for _ in values))]
            return [c >= needed for c in counts], counts

        bottom = jnp.minimum(float_key(least), float_key(peak))
        several = cuts & (number > wanted)
        kth = _search(
            functools.partial(count, needed=wanted), bottom, float_key(peak), number, wanted, several, counted
        )
        low = jnp.where(several, jnp.maximum(low, kth), low)

        def weigh(values: list):
            def look(x, sums):
                weight = jnp.exp2(jnp.where(x == peak, 0.0, (x - peak) * factor))
                weight = jnp.where(x >= low, weight, 0.0)
                total, *others = sums
                masses = [s + jnp.sum(jnp.where(x >= v, weight, 0.0), axis=0)
                          for s, v in zip(others[::2], values, strict=True)]  # fmt: skip
                counts = [s + jnp.sum((x >= v).astype(jnp.int32), axis=0)
                          for s, v in zip(others[1::2], values, strict=True)]  # fmt: skip
                pairs = [one for pair in zip(masses, counts, strict=True) for one in pair]
                return total + jnp.sum(weight, axis=0), *pairs

            total, *pairs = sweep(look, (_full(0.0), *(_full(0.0), _full(0)) * len(values)))
            needed = share * jnp.sum(total)
            return [jnp.sum(s) >= needed for s in pairs[::2]], [jnp.sum(s) for s in pairs[1::2]]

        bottom = jnp.maximum(bottom, jnp.minimum(float_key(low), float_key(peak)))
        nucleus = _search(weigh, bottom, float_key(peak), number, -1, share < 1, weighed)
        low_ref[row] = jnp.where(share < 1, jnp.maximum(low, nucleus), low)


def _search(look: Callable, bottom, top, number, exact, active, candidates: int):
    """The largest value between the keys bottom and top of which `look` says that enough is at or above it.

    look(values) -> (is it enough, how many logits) at or above each value; enough at bottom, not above top. number:
    of logits at bottom, or more. Ends early at a value with `exact` logits, and with one logit between the bounds:
    then the value may be another one, but what is at or above it is the same.
    """

    def undecided(state):
        low, high, above_low, above_high, _ = state
        return active & (high - low > 1) & (above_low != exact) & (above_low - above_high != 1)

    def narrow(state):
        low, high, above_low, above_high, number = state
        keys = _candidates(low, high, number < BY_VALUE, candidates)
        enough, counts = look([key_float(key) for key in keys])
        for key, fits, count in zip(keys, enough, counts, strict=True):
            higher, lower = fits & (key >= low), ~fits & (key < high)
            low, above_low = jnp.where(higher, key, low), jnp.where(higher, count, above_low)
            high, above_high = jnp.where(lower, key, high), jnp.where(lower, count, above_high)
        return low, high, above_low, above_high, number + 1

    state = bottom, top + jnp.uint32(1), number, jnp.int32(0), jnp.int32(0)
    return key_float(lax.while_loop(undecided, narrow, state)[0])


def _candidates(low, high, by_value, number: int) -> list:
    """Keys in [low, high) that cut the range of values, or of keys, about evenly; at least one of them is above low."""
    first, last = key_float(low), key_float(high - 1)
    by_value &= (jnp.abs(first) < jnp.inf) & (jnp.abs(last) < jnp.inf)
    span, parts = high - low, number + 1
    step, rest = lax.div(span, jnp.uint32(parts)), lax.rem(span, jnp.uint32(parts))
    keys = []
    for part in range(1, parts):
        even = low + step * jnp.uint32(part) + lax.div(rest * jnp.uint32(part), jnp.uint32(parts))
        value = first * jnp.float32(1 - part / parts) + last * jnp.float32(part / parts)
        keys.append(jnp.where(by_value, jnp.clip(float_key(value), low, high - 1), even))
    keys[-1] = jnp.where(by_value & (span > 1), jnp.maximum(keys[-1], low + 1), keys[-1])
    return keys


def _full(value):
    return jnp.full((COLUMNS,), value, jnp.int32 if isinstance(value, int) else jnp.float32)
