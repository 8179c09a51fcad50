"""What one program of prefill_mosaic's launch knows: sizes, memory, barriers, and which items are its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .mosaic_tiles import COLUMNS, ROWS


@dataclass(frozen=True, slots=True)
class Item:
    """A tile of some query heads. In few registers, as the next one's are kept while one is worked on."""

    start: jax.Array  # its first token
    position: jax.Array  # that one's, in its sequence
    seq_count: jax.Array  # its sequence, and 65536 times its tokens
    head: jax.Array  # its first query head

    @property
    def seq(self) -> jax.Array:
        return self.seq_count & 0xFFFF

    @property
    def count(self) -> jax.Array:
        return lax.shift_right_logical(self.seq_count, 16)

    @property
    def context(self) -> jax.Array:
        """Of its last token."""
        return self.position + self.count


@dataclass(frozen=True, slots=True)
class Program:
    """Number `sm` of the launch. Refs to global memory, then to shared memory and barriers, in the launch's order."""

    config: Any  # PrefillConfig
    factor: float  # scale * log2(e)
    num_consumers: int
    num_blocks: int
    kv_heads: int
    interpret: bool
    sm: jax.Array
    layer: Any  # [1]
    q: Any  # [T, Hq, D]
    kv: Any  # [L * 2 * N * Hkv, P, D]
    tables: Any  # [B, W]
    starts: Any  # [B + 1]
    work: Any  # [NT, 3]
    deal: Any  # [num_sms, 2]
    out: Any  # [T, Hq, D]
    rows: (
        Any  # queries, output: each as tiles [I, C, D / 64, 64, 64] and as tokens [I, C, D / 64, 64 / heads, heads, 64]
    )
    rings: Any  # keys, values: [stages, tile, D]
    full: Any
    free: Any
    q_full: Any
    q_free: Any
    turns: Any
    sums: Any  # [C, 64]
    weights: Any = None  # [C, 64, tile], the interpreter's

    @property
    def width(self) -> int:
        """Tokens of a consumer."""
        return ROWS // self.config.heads

    @property
    def chunks(self) -> range:
        return range(self.q.shape[2] // COLUMNS)

    def slot(self, count) -> jax.Array:
        return lax.rem(count, self.config.num_stages)

    def kv_tiles(self, context) -> jax.Array:
        return lax.div(context + (self.config.tile - 1), self.config.tile)

    def each_item(self, work: Callable[..., None]) -> tuple[jax.Array, jax.Array]:
        """Calls work(items so far, kv tiles so far, Item) for the program's items; returns both numbers."""
        dealt = self.deal[self.sm, 0], self.deal[self.sm, 1]
        items = lax.shift_right_logical(dealt[1], 16)

        def body(index, carry):
            tiles, *now = carry
            item, ahead = Item(*now), self.item(jnp.minimum(index + 1, items - 1), *dealt)  # global memory is slow
            work(index, tiles, item)
            return tiles + self.kv_tiles(item.context), *ahead

        tiles, *_ = lax.fori_loop(0, items, body, (jnp.int32(0), *self.item(jnp.int32(0), *dealt)))
        return items, tiles

    def item(self, index, first, counts) -> tuple[jax.Array, ...]:
        """Fields of an Item, the program's number `index`; see prefill_mosaic_work. Any row's where there is none."""
        num_sms, groups, lanes = self.config.num_sms, self.q.shape[1] // self.config.heads, self.config.lanes
        short = index >= counts & 0xFFFF
        long_item = index * num_sms + jnp.where(lax.rem(index, 2) == 0, self.sm, num_sms - 1 - self.sm)
        item = jnp.where(short, first + index, long_item)
        row, group = lax.div(item, groups), lax.rem(item, groups)
        if lanes > 1:
            row = jnp.where(short, lax.div(item, groups // lanes), row)
            group = jnp.where(short, lax.rem(item, groups // lanes) * lanes, group)
        row = jnp.minimum(row, self.work.shape[0] - 1)
        return self.work[row, 0], self.work[row, 1], self.work[row, 2], group * self.config.heads

    def share(self, consumer, count) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of an item of `count` tokens, a consumer's first token and first head, from the item's on, and its tokens."""
        single = count == 1
        token = jnp.where(single, 0, consumer * self.width)
        head = jnp.where(single, jnp.minimum(consumer, self.config.lanes - 1) * self.config.heads, 0)
        tokens = jnp.where(single, jnp.int32(consumer < self.config.lanes), jnp.clip(count - token, 0, self.width))
        return token, head, tokens
