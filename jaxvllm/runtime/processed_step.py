"""The second variant of a bucket's step, with logit processors and log-probabilities.

Same plan, same forward, same sampler as the plain one (`step`); between head and sampler stands `processors`.
Owns: what this variant takes and returns besides. Must not know: the mesh, compilation, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.models.registry import family
from jaxvllm.runtime.logprobs import gather_logprobs, prompt_logprobs
from jaxvllm.runtime.numerics import numerics_of
from jaxvllm.runtime.processors import ProcessorState, count_tokens, process, unpack_knobs
from jaxvllm.runtime.state import DeviceState, KVCache
from jaxvllm.runtime.step import draw, next_logits, run_model, unpack

States = tuple[DeviceState, ProcessorState]


def make_processed_step(layout: PlanLayout, model: ModelConfig, engine: EngineConfig, backends: ResolvedBackends,
                        axis: str, unroll: bool) -> Callable[..., Any]:  # fmt: skip
    """(params, (state, processor state), buffer, knobs [B, K] int32) -> (states, (tokens [B], floats, ints)).

    floats and ints [B, 1 + max_logprobs]: see ``gather_logprobs``; of the model's own distribution, or of the one that
    was drawn from (logprobs_mode).
    """
    numerics = numerics_of(backends)

    def step(params: Mapping[str, Any], states: States, buffer: jax.Array, knob_words: jax.Array
             ) -> tuple[States, tuple[jax.Array, jax.Array, jax.Array]]:  # fmt: skip
        state, processors = states
        plan, knobs = unpack(buffer, layout), unpack_knobs(knob_words)
        raw, kv = next_logits(params, state, plan, layout, model, backends, axis)

        def processed(raw: jax.Array, knobs: dict[str, jax.Array], rows: jax.Array, positions: jax.Array,
                      temperatures: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
            return process(raw, knobs, processors, rows, positions, temperatures, vocab_size=model.vocab_size,
                           axis=axis, unroll=unroll, numerics=numerics)  # fmt: skip

        raw, logits = numerics.rows(processed)(raw, knobs, plan.rows, plan.sample_positions, plan.temperatures)
        state, tokens = draw(logits, kv, state, plan, model, backends, axis)
        if engine.logprobs_mode == "processed_logprobs":
            raw = numerics.settle(logits / jnp.where(plan.temperatures > 0, plan.temperatures, 1.0)[:, None])
        gather = partial(gather_logprobs, num_top=engine.max_logprobs, axis=axis, numerics=numerics)
        numbers = numerics.rows(gather)(raw, tokens)
        return (state, count_tokens(processors, plan.rows, tokens, axis)), (tokens, *numbers)

    return step


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
