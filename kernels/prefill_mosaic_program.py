"""What one program of prefill_mosaic's launch knows: sizes, memory, barriers, and which items are its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .mosaic_tiles import COLUMNS, ROWS


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
    work: Any  # [NT, 5]
    deal: Any  # [num_sms, 3]
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
        """Calls work(items so far, kv tiles so far, item) for the program's items; returns both numbers."""
        longs, first, shorts = (self.deal[self.sm, i] for i in range(3))
        items = longs + shorts

        def body(index, carry):
            tiles, *item = carry
            following = self.item(jnp.minimum(index + 1, items - 1), longs, first)  # early: global memory is slow
            work(index, tiles, item)
            return tiles + self.kv_tiles(item[4]), *following

        tiles, *_ = lax.fori_loop(0, items, body, (jnp.int32(0), *self.item(jnp.int32(0), longs, first)))
        return items, tiles

    def item(self, index, longs, first) -> tuple[jax.Array, ...]:
        """Row of the work table and first head of the program's item number `index`; see prefill_mosaic_work.

        Where there is none, anything that lies in the table.
        """
        num_sms, groups = self.config.num_sms, self.q.shape[1] // self.config.heads
        short = index >= longs
        long_item = index * num_sms + jnp.where(lax.rem(index, 2) == 0, self.sm, num_sms - 1 - self.sm)
        item = jnp.where(short, first + index - longs, long_item)
        groups = jnp.where(short, groups // self.config.lanes, groups)
        row = jnp.minimum(lax.div(item, groups), self.work.shape[0] - 1)
        heads = jnp.where(short, self.config.lanes * self.config.heads, self.config.heads)
        return *(self.work[row, i] for i in range(self.work.shape[1])), lax.rem(item, groups) * heads

    def share(self, consumer, count) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of an item of `count` tokens, a consumer's first token and first head, from the item's on, and its tokens."""
        single = count == 1
        token = jnp.where(single, 0, consumer * self.width)
        head = jnp.where(single, jnp.minimum(consumer, self.config.lanes - 1) * self.config.heads, 0)
        tokens = jnp.where(single, jnp.int32(consumer < self.config.lanes), jnp.clip(count - token, 0, self.width))
        return token, head, tokens
