"""What one program of prefill_mosaic's launch knows: sizes, memory, barriers, and which items are its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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
        num_items = self.work.shape[0] * (self.q.shape[1] // self.config.heads)

        def body(index, carry):
            items, tiles, *item = carry
            following = self.item(index + 1)  # read early: global memory is slow
            context = item[4]
            pl.when(context > 0)(lambda: work(items, tiles, item))
            used = context > 0
            return items + used.astype(jnp.int32), tiles + jnp.where(used, self.kv_tiles(context), 0), *following

        rounds = pl.cdiv(num_items, self.config.num_sms)
        items, tiles, *_ = lax.fori_loop(0, rounds, body, (jnp.int32(0), jnp.int32(0), *self.item(jnp.int32(0))))
        return items, tiles

    def item(self, index) -> tuple[jax.Array, ...]:
        """Row of the work table and first head of the program's item number `index`; context -1: there is none."""
        #  round 0   program 0 1 2 ... n-1        the heaviest to program 0
        #  round 1   program n-1 ... 2 1 0        and it gets the lightest of the next round
        num_sms, groups = self.config.num_sms, self.q.shape[1] // self.config.heads
        item = index * num_sms + jnp.where(lax.rem(index, 2) == 0, self.sm, num_sms - 1 - self.sm)
        num_items = self.work.shape[0] * groups
        row = lax.div(jnp.minimum(item, num_items - 1), groups)
        *fields, context = (self.work[row, i] for i in range(self.work.shape[1]))
        return *fields, jnp.where(item < num_items, context, -1), lax.rem(item, groups) * self.config.heads
