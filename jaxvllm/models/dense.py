"""What dense decoder families share: the table of their parameters and the skeleton of their forward.

A pre-norm transformer with grouped-query attention, rotary embedding and SwiGLU. A family adds what is its own: names
of further per-layer vectors to the table, and ``qkv``, how a layer's queries, keys and values come from its input. The
forward is a pure function of local shapes; how tokens see each other is the caller's: ``attend`` writes to a paged
cache in the engine and is dense and causal in a training script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.config import ConfigError, ModelConfig
from jaxvllm.models.arithmetic import PLAIN, Arithmetic
from jaxvllm.models.layers import embed_tokens, project_parts, tp_sum
from jaxvllm.models.params import ParamInfo, Source, Table

# (layer, an int32 scalar; q [T, Hq, D]; k, v [T, Hkv, D], or None when they are written already; carry)
# -> (out [T, Hq, D], carry)
type Attend[Carry] = Callable[
    [jax.Array, jax.Array, jax.Array | None, jax.Array | None, Carry],
    tuple[jax.Array, Carry],
]
# (layer's number, its weights, normed input [T, H], cos, sin [T, D/2], carry) -> q, k, v as attend takes them, carry
type QKV[Carry] = Callable[
    [jax.Array, Mapping[str, jax.Array], jax.Array, jax.Array, jax.Array, Carry],
    tuple[jax.Array, jax.Array | None, jax.Array | None, Carry],
]
STD = 0.02  # of random weights


@dataclass(frozen=True, slots=True)
class Fused[Carry]:
    """Kernels for what lies between the projections; each computes what the plain lines of a forward do.

    add_norm(x, delta, weights [R, H], row, turn) -> (x + delta, its norm with weights[row]), both [T, H]; delta [T, H],
    or [parts, T, H] float32 to be summed first. turn: 0 and 1 before and between a layer's sublayers, 2 at the end.
    sums: add_norm also sums delta over the shards.
    parts: in how many the products that end a sublayer are computed (``project_parts``); 1 = whole.
    norm_rope_write(layer, qkv [T, Hkv, G + 2, D], q_norm [L, D], k_norm [L, D], cos, sin [T, D/2], carry)
    -> (q [T, Hq, D] normed and rotated, the carry with keys and values written).
    rope_write(layer, qkv, cos, sin, carry): the same without norms, or None: plain lines do it.
    Norm weights are handed over whole: a layer's slice would be a copy of its own.
    """

    add_norm: Callable[[jax.Array, jax.Array, jax.Array, int | jax.Array, int], tuple[jax.Array, jax.Array]]
    norm_rope_write: Callable[..., tuple[jax.Array, Carry]]
    parts: int = 1
    sums: bool = False
    rope_write: Callable[..., tuple[jax.Array, Carry]] | None = None


def param_table(config: ModelConfig, *, tp: int = 1, qk_norm: bool = False, qkv_bias: bool = False) -> Table:
    """Every parameter of the model. ``tp=1`` is the canonical form that checkpoints store.

    The query, key and value rows of one key/value head lie together, [Hkv, G + 2, D, H] (G query heads, k, v), so that
    one fused projection can be sharded over Hkv at any tp without rearranging:

        qkv[h]:  | q(h*G) | q(h*G+1) | ... | q(h*G+G-1) | k(h) | v(h) |     each D x H

    With tp above the number of key/value heads, each of them is stored tp / Hkv times, with its share of the query
    heads. The vocabulary is padded to a multiple of tp with zero rows, which are never sampled. qk_norm adds q_norm and
    k_norm [L, D]; qkv_bias adds qkv_bias [L, Hkv, G + 2, D], which lies as the projection's rows do. Vectors are
    stacked over layers: a leaf less costs less at each dispatch.

    Raises ConfigError when heads or mlp don't divide.
    """
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    q_heads, kv_heads, mlp = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    _check_divides(config, tp)
    copies = max(1, tp // kv_heads)
    stored, groups = kv_heads * copies, config.num_groups // copies
    q_rows, kv_rows = q_heads * head_dim, kv_heads * head_dim
    every = slice(None)
    infos = [_vocabulary(config, tp, "embed", "model.embed_tokens.weight"),
             ParamInfo("final_norm", (hidden,), (None,), None, (Source("model.norm.weight", (hidden,)),))]  # fmt: skip
    if not config.tie_word_embeddings:
        infos.append(_vocabulary(config, tp, "head", "lm_head.weight"))

    def stacked(path: str, size: int, name: str) -> ParamInfo:
        sources = [Source(f"model.layers.{i}.{name}.weight", (size,), (i,)) for i in range(layers)]
        return ParamInfo(path, (layers, size), (None, None), None, tuple(sources))

    infos += [stacked("input_norm", hidden, "input_layernorm"),
              stacked("post_norm", hidden, "post_attention_layernorm")]  # fmt: skip
    if qk_norm:
        infos += [stacked("q_norm", head_dim, "self_attn.q_norm"), stacked("k_norm", head_dim, "self_attn.k_norm")]
    if qkv_bias:
        sources = [
            source
            for i in range(layers)
            for source in (
                Source(f"model.layers.{i}.self_attn.q_proj.bias", (q_rows,), (i, every, slice(0, groups))),
                Source(f"model.layers.{i}.self_attn.k_proj.bias", (kv_rows,), (i, every, groups), copies),
                Source(f"model.layers.{i}.self_attn.v_proj.bias", (kv_rows,), (i, every, groups + 1), copies),
            )
        ]
        shape = (layers, stored, groups + 2, head_dim)
        infos.append(ParamInfo("qkv_bias", shape, (None, "tp", None, None), STD, tuple(sources)))
    for i in range(layers):
        hf = f"model.layers.{i}"
        infos += [
            ParamInfo(f"layers.{i}.qkv", (stored, groups + 2, head_dim, hidden), ("tp", None, None, None), STD, (
                Source(f"{hf}.self_attn.q_proj.weight", (q_rows, hidden), (every, slice(0, groups))),
                Source(f"{hf}.self_attn.k_proj.weight", (kv_rows, hidden), (every, groups), copies),
                Source(f"{hf}.self_attn.v_proj.weight", (kv_rows, hidden), (every, groups + 1), copies))),
            ParamInfo(f"layers.{i}.o", (hidden, q_rows), (None, "tp"), STD,
                      (Source(f"{hf}.self_attn.o_proj.weight", (hidden, q_rows)),)),
            ParamInfo(f"layers.{i}.gate_up", (2, mlp, hidden), (None, "tp", None), STD, (
                Source(f"{hf}.mlp.gate_proj.weight", (mlp, hidden), (0,)),
                Source(f"{hf}.mlp.up_proj.weight", (mlp, hidden), (1,)))),
            ParamInfo(f"layers.{i}.down", (hidden, mlp), (None, "tp"), STD,
                      (Source(f"{hf}.mlp.down_proj.weight", (hidden, mlp)),)),
        ]  # fmt: skip
    return {info.path: info for info in infos}


def _check_divides(config: ModelConfig, tp: int) -> None:
    q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % tp and (tp % kv_heads or q_heads % tp):
        raise ConfigError(
            f"tensor_parallel_size={tp} must divide num_key_value_heads={kv_heads}, or be a multiple that divides "
            f"num_attention_heads={q_heads}"
        )
    if config.intermediate_size % tp:
        raise ConfigError(f"tensor_parallel_size={tp} must divide intermediate_size={config.intermediate_size}")


def _vocabulary(config: ModelConfig, tp: int, path: str, name: str) -> ParamInfo:
    rows, padded = config.vocab_size, -(-config.vocab_size // tp) * tp
    source = Source(name, (rows, config.hidden_size), (slice(0, rows),))
    return ParamInfo(path, (padded, config.hidden_size), ("tp", None), STD, (source,))


def forward[Carry](params: Mapping[str, Any], config: ModelConfig, token_ids: jax.Array, positions: jax.Array,
                   attend: Attend[Carry], carry: Carry, qkv: QKV[Carry], *, axis: str | None = None,
                   fused: Fused[Carry] | None = None, arithmetic: Arithmetic = PLAIN
                   ) -> tuple[jax.Array, Carry]:  # fmt: skip
    """token_ids [T], positions [T] int32 -> hidden states [T, H] after the last norm, and the carry.

    ``params`` holds this shard's part of the tree (``params.nest``); T packs the tokens of all sequences. ``carry`` is
    threaded through ``qkv`` and ``attend`` layer by layer (the KV cache in the engine). ``axis`` names the mesh axis,
    None outside. ``fused`` replaces elementwise chains by kernels that compute the same; ``arithmetic`` is what ``qkv``
    computes with, too.
    """
    project, sums = arithmetic.project, fused is not None and fused.sums
    cos, sin = arithmetic.rope_tables(positions, config.rope, config.head_dim)

    def add_norm(x: jax.Array, delta: jax.Array, weights: jax.Array, row: int | jax.Array, turn: int
                 ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        if fused is not None:
            return fused.add_norm(x, delta, weights, row, turn)
        return arithmetic.add_rms_norm(x, delta, weights, row, eps=config.rms_norm_eps)

    def end_sublayer(y: jax.Array, weight: jax.Array) -> jax.Array:
        if fused is not None and fused.parts > 1:
            return project_parts(y, weight, fused.parts)
        return project(y, weight) if sums else arithmetic.tp_sum(project(y, weight), axis)

    # One function for all layers: it is traced and lowered once and called L times with the layer's number as an
    # operand. XLA inlines the calls, so the compiled step is the same as an unrolled one.
    @jax.jit
    def block(i: jax.Array, layer: Mapping[str, jax.Array], x: jax.Array, delta: jax.Array, carry: Carry
              ) -> tuple[jax.Array, jax.Array, Carry]:  # fmt: skip
        x, y = add_norm(x, delta, params["input_norm"], i, 0)
        q, k, v, carry = qkv(i, layer, y, cos, sin, carry)
        out, carry = attend(i, q, k, v, carry)
        delta = end_sublayer(out.reshape(out.shape[0], -1), layer["o"])
        x, y = add_norm(x, delta, params["post_norm"], i, 1)
        gate_up = project(y, layer["gate_up"])  # [T, 2, I_local]
        return x, end_sublayer(arithmetic.silu_mul(gate_up), layer["down"]), carry

    embedded = embed_tokens(params["embed"], token_ids, axis)
    # x is the residual stream [T, H], delta what the last sublayer adds to it
    if sums:
        x, delta = jnp.zeros_like(embedded), embedded
    else:
        x, delta = tp_sum(embedded, axis), jnp.zeros_like(embedded)
    if fused is not None and fused.parts > 1:
        delta = jnp.zeros((fused.parts, *x.shape), jnp.float32)
    for i, layer in enumerate(params["layers"]):
        x, delta, carry = block(jnp.int32(i), layer, x, delta, carry)
    return add_norm(x, delta, params["final_norm"][None], 0, 2)[1], carry


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, Hkv, G + 2, D] -> q [T, Hkv * G, D], k [T, Hkv, D], v [T, Hkv, D]."""
    tokens, kv_heads, lanes, head_dim = qkv.shape
    q = qkv[:, :, : lanes - 2].reshape(tokens, kv_heads * (lanes - 2), head_dim)
    return q, qkv[:, :, lanes - 2], qkv[:, :, lanes - 1]


def rotated[Carry](i: jax.Array, rows: jax.Array, cos: jax.Array, sin: jax.Array, carry: Carry,
                   fused: Fused[Carry] | None, arithmetic: Arithmetic
                   ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Carry]:  # fmt: skip
    """rows [T, Hkv, G + 2, D] -> what ``qkv`` returns, for families without a norm on heads."""
    if fused is not None and fused.rope_write is not None:
        q, carry = fused.rope_write(i, rows, cos, sin, carry)
        return q, None, None, carry
    q, k, v = split_qkv(rows)
    return arithmetic.apply_rope(q, cos, sin), arithmetic.apply_rope(k, cos, sin), v, carry


def head_table(params: Mapping[str, Any]) -> jax.Array:
    """The vocabulary projection [V_local, H]: the embedding itself where they are tied."""
    head = params.get("head")
    return params["embed"] if head is None else head
