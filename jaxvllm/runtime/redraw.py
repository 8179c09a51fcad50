"""The second half of a step whose requests use logit processors or log-probabilities: it draws again.

A step leaves its logits on the device. This function, one for each number of sequences and without the model in it,
processes them and draws in the step's place, with the same sampler and noise. Must not know: the mesh, compilation,
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.knobs import DRAW
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.runtime.logprobs import gather_logprobs
from jaxvllm.runtime.numerics import numerics_of
from jaxvllm.runtime.processors import ProcessorState, count_tokens, process, unpack_words
from jaxvllm.runtime.step import draw

type States = tuple[jax.Array, ProcessorState]  # last_tokens [max_num_seqs] int32, what the processors know


def make_redraw(model: ModelConfig, engine: EngineConfig, backends: ResolvedBackends, axis: str, unroll: bool
                ) -> Callable[..., Any]:  # fmt: skip
    """(states, logits [B, V_local] float32, words [B, len(DRAW)] int32) -> (states, (tokens [B], floats, ints)).

    floats and ints [B, 1 + max_logprobs]: see ``gather_logprobs``; of the model's own distribution, or of the one that
    was drawn from (logprobs_mode).
    """
    numerics = numerics_of(backends)

    def redraw(states: States, logits: jax.Array, words: jax.Array
               ) -> tuple[States, tuple[jax.Array, jax.Array, jax.Array]]:  # fmt: skip
        last_tokens, processors = states
        knobs = unpack_words(words, DRAW)
        plan = SimpleNamespace(seeds=jnp.stack([knobs["seed_low"], knobs["seed_high"]], axis=1), **knobs)

        def processed(logits: jax.Array, knobs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            return process(logits, knobs, processors, knobs["rows"], knobs["sample_positions"], knobs["temperatures"],
                           vocab_size=model.vocab_size, axis=axis, unroll=unroll, numerics=numerics,
                           backend=backends.fused)  # fmt: skip

        raw, changed, lows = numerics.rows(processed)(logits, knobs)
        tokens, last_tokens = draw(changed, last_tokens, plan, model, backends, axis, lows)
        if engine.logprobs_mode == "processed_logprobs":
            changed = jnp.where(changed >= lows[:, None], changed, -jnp.inf)
            raw = numerics.settle(changed / jnp.where(plan.temperatures > 0, plan.temperatures, 1.0)[:, None])
        gather = partial(gather_logprobs, num_top=engine.max_logprobs, axis=axis, numerics=numerics)
        numbers = numerics.rows(gather)(raw, tokens)
        return (last_tokens, count_tokens(processors, plan.rows, tokens, axis)), (tokens, *numbers)

    return redraw
