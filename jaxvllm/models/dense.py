"""What dense decoder families share: the table of their parameters and the skeleton of their forward.

A pre-norm transformer with grouped-query attention, rotary embedding and SwiGLU. A family adds what is its own: names
of further per-layer vectors to the table, and ``qkv``, how a layer's queries, keys and values come from its input. The
forward is a pure function of local shapes; how tokens see each other is the caller's: ``attend`` writes to a paged
cache in the engine and is dense and causal in a training script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxvllm.config import ConfigError, ModelConfig
from jaxvllm.models.layers import embed_tokens, project, rms_norm, rope_tables, tp_sum
from jaxvllm.models.params import ParamInfo, Source, Table

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], carry) -> (out [T, Hq, D], carry)
type Attend[Carry] = Callable[[int, jax.Array, jax.Array, jax.Array, Carry], tuple[jax.Array, Carry]]
# (params, layer, normed input [T, H], cos, sin [T, D/2]) -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]
type QKV = Callable[[Mapping[str, Any], int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
STD = 0.02  # of random weights


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
            attend: Attend[Carry], carry: Carry, qkv: QKV, *, axis: str | None = None
            ) -> tuple[jax.Array, Carry]:  # fmt: skip
    """token_ids [T], positions [T] int32 -> hidden states [T, H] after the last norm, and the carry.

    ``params`` holds this shard's part of the tree (``params.nest``); T packs the tokens of all sequences. ``carry`` is
    threaded through ``attend`` layer by layer (the KV cache in the engine). ``axis`` names the mesh axis, None outside.
    """
    eps = config.rms_norm_eps
    x = embed_tokens(params["embed"], token_ids, axis)  # [T, H]
    cos, sin = rope_tables(positions, config.rope, config.head_dim)
    for i, layer in enumerate(params["layers"]):
        y = rms_norm(x, params["input_norm"][i], eps)
        q, k, v = qkv(params, i, y, cos, sin)
        out, carry = attend(i, q, k, v, carry)
        x = x + tp_sum(project(out.reshape(out.shape[0], -1), layer["o"]), axis)
        y = rms_norm(x, params["post_norm"][i], eps)
        gate_up = project(y, layer["gate_up"])  # [T, 2, I_local]
        x = x + tp_sum(project(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], layer["down"]), axis)
    return rms_norm(x, params["final_norm"], eps), carry


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, Hkv, G + 2, D] -> q [T, Hkv * G, D], k [T, Hkv, D], v [T, Hkv, D]."""
    tokens, kv_heads, lanes, head_dim = qkv.shape
    q = qkv[:, :, : lanes - 2].reshape(tokens, kv_heads * (lanes - 2), head_dim)
    return q, qkv[:, :, lanes - 2], qkv[:, :, lanes - 1]


def head_table(params: Mapping[str, Any]) -> jax.Array:
    """The vocabulary projection [V_local, H]: the embedding itself where they are tied."""
    head = params.get("head")
    return params["embed"] if head is None else head
