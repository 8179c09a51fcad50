"""Who computes what in a launch of prefill_mosaic: two tables that XLA makes once a step, the same for every layer.

An item is one tile of the plan for some query heads of one kv head. Tiles of several tokens are few and long, those
of one token (decoding rows) many and short, so they are dealt apart: the long items back and forth, then the short
ones like water into what is uneven.

    load of a program   |####|        |    |          | long items: the heaviest to program 0 ... n - 1,
                        |####|####    |    |            the next ones to n - 1 ... 0
                        |####|####|###|###.|.......   . short items, up to one level
    program               0    1    2   3   4     5
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_LONG = 1 << 30  # above every context
MAX_ITEMS = (1 << 16) - 1  # and sequences: see `packed`


def work_table(context_lens, query_start, tile_seq, tile_start, query_tile: int) -> jax.Array:
    """int32 [NT, 5]: a tile's sequence, first token, tokens, first position, context of its last token.

    First the tiles of several tokens, then those of one, each heaviest first; then those without work: 0 tokens.
    """
    used = tile_seq >= 0
    seq = jnp.where(used, tile_seq, 0)
    seq_end = query_start[seq + 1]
    count = jnp.where(used, jnp.minimum(query_tile, seq_end - tile_start), 0)
    position = context_lens[seq] - seq_end + tile_start
    context = jnp.where(used, position + count, -1)
    table = jnp.stack([seq, tile_start, count, position, context], axis=1)
    weight = context + jnp.where(count > 1, _LONG, 0)
    index = jnp.arange(tile_seq.shape[0], dtype=jnp.int32)
    ahead = (weight > weight[:, None]) | ((weight == weight[:, None]) & (index < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)  # a sort of some hundred numbers: no sort kernel in the step
    return jnp.sum(jnp.where((rank == index[:, None])[:, :, None], table, 0), axis=1, dtype=jnp.int32)


def costs(work: jax.Array, kv_tile: int) -> jax.Array:
    """int32 [NT]: of an item of each tile, in kv tiles; one more for its beginning and end."""
    return pl.cdiv(work[:, 4], kv_tile) + 1


def long_loads(work: jax.Array, long_items: int, kv_tile: int, programs: int) -> tuple[jax.Array, jax.Array]:
    """int32 [programs] each: the cost and the number of a program's long items.

    A tile of several tokens is long_items of them; item i is of tile i // long_items. Number r of program p is item
    r * programs + p, in odd rounds counted from the last program.
    """
    each = jnp.repeat(jnp.where(work[:, 2] > 1, costs(work, kv_tile), 0), long_items)
    rounds = pl.cdiv(each.shape[0], programs)
    each = jnp.pad(each, (0, rounds * programs - each.shape[0])).reshape(rounds, programs)
    odd = jnp.arange(rounds, dtype=jnp.int32)[:, None] % 2 == 1
    each = jnp.where(odd, each[:, ::-1], each)
    return jnp.sum(each, axis=0, dtype=jnp.int32), jnp.sum(each > 0, axis=0, dtype=jnp.int32)


def deal(work: jax.Array, long_items: int, short_items: int, *, kv_tile: int, programs: int) -> jax.Array:
    """int32 [programs, 3]: a program's number of long items (`long_loads`), its first short one, its number of those.

    A tile of one token is short_items of them; item i is of tile i // short_items.
    """
    loads, longs = long_loads(work, long_items, kv_tile, programs)
    each = jnp.repeat(jnp.where(work[:, 2] == 1, costs(work, kv_tile), 0), short_items)
    water = jnp.sum(each, dtype=jnp.int32)
    below = jnp.sum(jnp.maximum(loads[:, None] - loads, 0), axis=1, dtype=jnp.int32)  # that reaches this one's load
    wet = below < water
    level = pl.cdiv(water + jnp.sum(jnp.where(wet, loads, 0), dtype=jnp.int32), jnp.maximum(jnp.sum(wet), 1))
    room = jnp.cumsum(jnp.where(wet, level - loads, 0))
    room = jnp.where(jnp.arange(programs, dtype=jnp.int32) == programs - 1, _LONG, room)  # whatever is left over
    middle = jnp.cumsum(each) - each // 2
    first = jnp.sum(work[:, 2] > 1, dtype=jnp.int32) * short_items
    ends = first + jnp.sum((each > 0) & (middle <= room[:, None]), axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([first[None], ends[:-1]])
    return jnp.stack([longs, starts, ends - starts], axis=1)


def packed(work: jax.Array, dealt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both tables as a program reads them, in few registers.

    int32 [NT, 3]: a tile's first token, its position, its sequence + 65536 * its tokens.
    int32 [programs, 2]: first short item - long ones, long ones + 65536 * all items.
    """
    seq, start, count, position, _ = work.T
    longs, first, shorts = dealt.T
    rows = jnp.stack([start, position, seq | count << 16], axis=1)
    return rows, jnp.stack([first - longs, longs | longs + shorts << 16], axis=1)
