"""One step as one function: unpack -> forward -> sample -> next state. Pure, on local shapes; one per bucket.

Owns: how a packed plan becomes arrays, how attention meets the cache, what the step returns. Must not know: the mesh,
compilation, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import (
    ResolvedBackends,
    add_rms_norm,
    all_reduce_add_rms_norm,
    decode_attention,
    mixed_attention,
    qk_norm_rope_write,
    ragged_attention,
    rope_write,
    write_kv,
)
from jaxvllm.models.dense import Fused
from jaxvllm.models.layers import head_logits, token_logprobs, tp_sum
from jaxvllm.models.registry import family
from jaxvllm.runtime.exchange import Exchange
from jaxvllm.runtime.logprobs import prompt_logprobs
from jaxvllm.runtime.numerics import numerics_of
from jaxvllm.runtime.sampler import sample
from jaxvllm.runtime.state import DeviceState, KVCache

PARTS = 4  # of the products that end a sublayer, for so many tokens: measured, see ARCHITECTURE.md
PARTS_TOKENS = range(129, 257)
MIXED_TOKENS = range(65, 2049)  # of a ragged step: smaller ones are few rows, in larger ones those don't count

type Carry = tuple[jax.Array, jax.Array]  # through the layers: the cache, and decode attention's arrivals


def unpack(buffer: jax.Array, layout: PlanLayout) -> SimpleNamespace:
    """The plan's named arrays from its one int32 buffer [layout.size]: static slices, bit casts, no copies kept."""
    plan = {}
    for name, offset, shape, dtype in layout.fields:
        size = 1
        for extent in shape:
            size *= extent
        words = lax.slice(buffer, (offset,), (offset + size,)).reshape(shape)
        plan[name] = words if dtype == "int32" else lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return SimpleNamespace(**plan)


def run_model(params: Mapping[str, Any], state: DeviceState, plan: SimpleNamespace, layout: PlanLayout,
              model: ModelConfig, backends: ResolvedBackends, axis: str, exchange: Exchange | None = None
              ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The forward over the paged cache: hidden states [T, H] and the cache with this step's keys and values.

    exchange: through which the shards add up their parts; None: all-reduces of XLA do it.
    """
    source = plan.token_src
    last = state.last_tokens[jnp.clip(source, 0, state.last_tokens.shape[0] - 1)]
    token_ids = jnp.where(source >= 0, last, plan.token_ids)
    scale = model.head_dim**-0.5
    if layout.bucket.kind == "decode" and backends.invariant:
        plan.query_start, plan.tile_seq, plan.tile_start = one_row_tiles(plan.context_lens)

    def attend(
        layer: jax.Array, q: jax.Array, k: jax.Array | None, v: jax.Array | None, carry: Carry
    ) -> tuple[jax.Array, Carry]:
        kv, arrivals = carry
        if k is not None and v is not None:
            kv = write_kv(kv, layer, k, v, plan.slot_mapping, backend=backends.write_kv)
        if layout.bucket.kind == "decode" and not backends.invariant:
            out, arrivals = decode_attention(q, kv, layer, plan.block_tables, plan.context_lens, arrivals, scale=scale,
                                             backend=backends.decode_attention)  # fmt: skip
        elif backends.mixed is not None and layout.bucket.num_tokens in MIXED_TOKENS:
            work = plan.block_tables, plan.context_lens, plan.query_start, plan.tile_seq, plan.tile_start
            out, arrivals = mixed_attention(q, kv, layer, work, arrivals, scale=scale, query_tile=layout.query_tile,
                                            backend=backends.mixed)  # fmt: skip
        else:
            out = ragged_attention(q, kv, layer, plan.block_tables, plan.context_lens, plan.query_start,
                                   plan.tile_seq, plan.tile_start, scale=scale, query_tile=layout.query_tile,
                                   backend=backends.ragged_attention, invariant=backends.invariant)  # fmt: skip
        return out, (kv, arrivals)

    fused = None if backends.fused is None else fused_kernels(plan, model, backends, axis, exchange)
    forward = family(model).forward
    heads = model.num_attention_heads // lax.axis_size(axis)
    carry = state.cache.kv, jnp.zeros((layout.bucket.num_seqs, heads), jnp.int32)
    hidden, (kv, _) = forward(params, model, token_ids, plan.positions, attend, carry, axis=axis, fused=fused,
                              arithmetic=numerics_of(backends).arithmetic)  # fmt: skip
    return hidden, kv


def one_row_tiles(context_lens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A decode step as a ragged one, context_lens [B] -> query_start [B + 1], tile_seq and tile_start [B]."""
    used = jnp.sum(context_lens > 0, dtype=jnp.int32)  # pads come last
    seq = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
    query_start = jnp.minimum(jnp.arange(context_lens.shape[0] + 1, dtype=jnp.int32), used)
    return query_start, jnp.where(seq < used, seq, -1), jnp.where(seq < used, seq, 0)


def fused_kernels(plan: SimpleNamespace, model: ModelConfig, backends: ResolvedBackends, axis: str,
                  exchange: Exchange | None) -> Fused[Carry]:  # fmt: skip
    """The forward's elementwise chains as kernels, for the plan's slots."""
    backend = backends.fused
    assert backend is not None

    def norm_rope_write(layer: jax.Array, qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array, cos: jax.Array,
                        sin: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:  # fmt: skip
        q, kv = qk_norm_rope_write(qkv, q_norm, k_norm, cos, sin, carry[0], layer, plan.slot_mapping,
                                   eps=model.rms_norm_eps, backend=backend)  # fmt: skip
        return q, (kv, carry[1])

    def rope_and_write(layer: jax.Array, qkv: jax.Array, cos: jax.Array, sin: jax.Array, carry: Carry
                       ) -> tuple[jax.Array, Carry]:  # fmt: skip
        q, kv = rope_write(qkv, cos, sin, carry[0], layer, plan.slot_mapping, backend=backend)
        return q, (kv, carry[1])

    tokens, shards = plan.positions.shape[0], lax.axis_size(axis)

    def add_norm(x: jax.Array, delta: jax.Array, weights: jax.Array, row: int | jax.Array, turn: int
                 ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        return add_rms_norm(x, delta, weights, row, eps=model.rms_norm_eps, backend=backend)

    def sum_add_norm(x: jax.Array, delta: jax.Array, weights: jax.Array, row: int | jax.Array, turn: int
                     ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        if exchange is None or tokens > exchange.capacity:
            return add_norm(x, tp_sum(delta, axis), weights, row, turn)
        return all_reduce_add_rms_norm(x, delta, weights, row, exchange.peers, turn=turn, capacity=exchange.capacity,
                                       eps=model.rms_norm_eps)  # fmt: skip

    if backends.invariant:
        return Fused(add_norm, norm_rope_write, rope_write=rope_and_write)
    if shards > 1:
        return Fused(sum_add_norm, norm_rope_write, sums=True)
    divides = not (model.num_attention_heads * model.head_dim % PARTS or model.intermediate_size % PARTS)
    parts = PARTS if tokens in PARTS_TOKENS and divides else 1
    return Fused(add_norm, norm_rope_write, parts)


def next_logits(params: Mapping[str, Any], state: DeviceState, plan: SimpleNamespace, layout: PlanLayout,
                model: ModelConfig, backends: ResolvedBackends, axis: str, exchange: Exchange | None
                ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The forward and the head: this shard's logits [B, V_local] for each sequence's next token, and the cache.

    The head runs on the last token of each sequence only (B rows, never all T tokens).
    """
    hidden, kv = run_model(params, state, plan, layout, model, backends, axis, exchange)
    if layout.bucket.kind != "decode":
        hidden = hidden[jnp.maximum(plan.query_start[1:] - 1, 0)]
    project = numerics_of(backends).arithmetic.project
    return head_logits(family(model).head_table(params), hidden, project), kv


def draw(logits: jax.Array, last_tokens: jax.Array, plan: Any, model: ModelConfig, backends: ResolvedBackends,
         axis: str, *lows: jax.Array, exchange: Exchange | None = None
         ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One token a sequence from the logits (tokens [B] int32), and last_tokens with them in the plan's rows.

    lows [B], if given: from logits that aren't lower. exchange: as ``run_model``'s; once a step.
    """
    numerics = numerics_of(backends)
    best_of = None if exchange is None else exchange.best_of_shards
    sample_rows = numerics.rows(partial(sample, vocab_size=model.vocab_size, axis=axis, backend=backends.fused,
                                        tiles=numerics.sample_tiles, best_of=best_of))  # fmt: skip
    tokens = sample_rows(logits, plan.temperatures, plan.seeds, plan.sample_positions, *lows)
    return tokens, last_tokens.at[plan.rows].set(tokens, mode="drop")


def make_step(layout: PlanLayout, model: ModelConfig, backends: ResolvedBackends, axis: str) -> Callable[..., Any]:
    """(params, state, logits, buffer, exchange) -> (state, logits, tokens [B] int32): one step of ``layout``'s bucket.

    The logits that come in are a buffer [B, V_local] float32 for those that go out, or None: then none do.
    exchange: see ``run_model``; None in ``Engine.score``'s and ``prompt_logprobs``' steps.
    """

    def step(params: Mapping[str, Any], state: DeviceState, room: jax.Array | None, buffer: jax.Array,
             exchange: Exchange | None = None) -> tuple[DeviceState, jax.Array | None, jax.Array]:  # fmt: skip
        plan = unpack(buffer, layout)
        logits, kv = next_logits(params, state, plan, layout, model, backends, axis, exchange)
        tokens, last_tokens = draw(logits, state.last_tokens, plan, model, backends, axis, exchange=exchange)
        state = DeviceState(cache=KVCache(kv=kv), last_tokens=last_tokens)
        return state, None if room is None else logits, tokens

    return step


def make_score(layout: PlanLayout, model: ModelConfig, backends: ResolvedBackends, axis: str) -> Callable[..., Any]:
    """(params, state, buffer, targets [T] int32) -> (state, logprobs [T] float32) through the same forward."""

    def score(params: Mapping[str, Any], state: DeviceState, buffer: jax.Array, targets: jax.Array
              ) -> tuple[DeviceState, jax.Array]:  # fmt: skip
        plan = unpack(buffer, layout)
        hidden, kv = run_model(params, state, plan, layout, model, backends, axis)
        head = family(model).head_table(params)
        if backends.invariant:  # the same sums as for a sampled token
            numbers, _ = prompt_logprobs(head, hidden, targets, 0, vocab_size=model.vocab_size, axis=axis,
                                         numerics=numerics_of(backends))  # fmt: skip
            return state.replace(cache=KVCache(kv=kv)), numbers[:, 0]  # type: ignore[attr-defined]
        logprobs = token_logprobs(head, hidden, targets, vocab_size=model.vocab_size, axis=axis)
        return state.replace(cache=KVCache(kv=kv)), logprobs  # type: ignore[attr-defined]

    return score


def make_prompt_logprobs(layout: PlanLayout, model: ModelConfig, engine: EngineConfig, backends: ResolvedBackends,
                         axis: str) -> Callable[..., Any]:  # fmt: skip
    """(params, state, buffer, targets [T] int32) -> (state, (floats, ints)), each [T, 1 + max_logprobs].

    The plan's slots are all past the cache's end: it is read, never written.
    """

    def run(params: Mapping[str, Any], state: DeviceState, buffer: jax.Array, targets: jax.Array
            ) -> tuple[DeviceState, tuple[jax.Array, jax.Array]]:  # fmt: skip
        plan = unpack(buffer, layout)
        hidden, kv = run_model(params, state, plan, layout, model, backends, axis)
        head = family(model).head_table(params)
        numbers = prompt_logprobs(head, hidden, targets, engine.max_logprobs, vocab_size=model.vocab_size, axis=axis,
                                  numerics=numerics_of(backends))  # fmt: skip
        return state.replace(cache=KVCache(kv=kv)), numbers  # type: ignore[attr-defined]

    return run
