"""What is compiled and for which shapes: a bucket's step, the redraws, forwards for scores; several at once.

Owns: the arguments of compiled functions, their sharding and donation, XLA's options. Must not know: which of them are
compiled already, when they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import DRAW
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.models.params import Table, nest
from jaxvllm.runtime.exchange import Exchange
from jaxvllm.runtime.mesh import TP, sharding, spmd
from jaxvllm.runtime.processors import PROCESSOR_SPECS, ProcessorState, processor_shapes, set_row
from jaxvllm.runtime.redraw import make_redraw
from jaxvllm.runtime.state import STATE_SPECS, logits_shape, state_shapes
from jaxvllm.runtime.step import make_step

# XLA's rematerialisation counts an updated cache as a new one, believes that 369 GB are needed and recomputes what it
# can: a slice of the plan in every layer, 28 launches of 1.1 us. What a step really needs is measured (memory.py).
GPU_OPTIONS = {"xla_gpu_memory_limit_slop_factor": "100000"}
# Else a bfloat16 that goes on inside a fusion keeps float32's bits, and what is fused depends on the step's shape.
INVARIANT_OPTIONS = {"xla_allow_excess_precision": False}

# Tracing holds the GIL: threads that trace at once keep each other from handing over to XLA, which doesn't. 13 steps in
# 16 threads, 2 cores: all traced between 7 and 18 s when at once, one after the other from 1 to 15 s.
TRACING = Lock()


class Compiler:
    """Compiles the functions of one model on one mesh."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, mesh: Mesh, table: Table, backends: ResolvedBackends,
                 exchange: Exchange | None) -> None:  # fmt: skip
        self.model, self.engine, self.mesh, self.backends, self.exchange = model, engine, mesh, backends, exchange
        self.param_specs = nest({path: P(*info.axes) for path, info in table.items()})
        dtype = jnp.dtype(engine.dtype)
        self.param_shapes = nest(
            {path: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding(mesh, info.axes))
             for path, info in table.items()}
        )  # fmt: skip
        self.on_gpu = mesh.devices.flat[0].platform == "gpu"
        options = (GPU_OPTIONS if self.on_gpu else {}) | (INVARIANT_OPTIONS if backends.invariant else {})
        self.options: dict[str, Any] | None = options or None

    @property
    def processor_shapes(self) -> ProcessorState:
        """The processors' state as ShapeDtypeStructs."""
        return processor_shapes(self.mesh, self.engine.max_num_seqs, self.model.vocab_size)

    def logits_shape(self, num_seqs: int) -> jax.ShapeDtypeStruct | None:
        """Of what a step of so many sequences leaves for its redraw; None in an engine without processors."""
        return logits_shape(self.model.vocab_size, self.mesh, num_seqs) if self.engine.enable_processors else None

    def step(self, layout: PlanLayout, num_blocks: int) -> Any:
        """A bucket's step: ``make_step``, the state and the logits donated."""
        state = state_shapes(self.model, self.engine, self.mesh, num_blocks)
        logits, specs = (
            self.logits_shape(layout.bucket.num_seqs),
            P(None, TP) if self.engine.enable_processors else None,
        )
        function = make_step(layout, self.model, self.backends, TP)
        exchange = jax.tree.map(lambda _: P(TP), self.exchange)
        in_specs = (self.param_specs, STATE_SPECS, specs, P(), exchange)
        mapped = spmd(function, self.mesh, in_specs, (STATE_SPECS, specs, P()))
        # unused: the logits of the step before, and the buffers of the exchange, which must live as long as it runs
        jitted = jax.jit(mapped, donate_argnums=(1, 2), keep_unused=True)
        return self._compile(jitted, self.param_shapes, state, logits, self._words(layout.size), self.exchange)

    def redraw(self, num_seqs: int) -> Any:
        """``make_redraw``, its states donated."""
        last_tokens = state_shapes(self.model, self.engine, self.mesh, 1).last_tokens
        function = make_redraw(self.model, self.engine, self.backends, TP, unroll=self.on_gpu)
        specs = P(), PROCESSOR_SPECS
        mapped = spmd(function, self.mesh, (specs, P(None, TP), P()), (specs, P()))
        states, words = (last_tokens, self.processor_shapes), self._words(num_seqs, len(DRAW))
        return self._compile(jax.jit(mapped, donate_argnums=(0,)), states, self.logits_shape(num_seqs), words)

    def forward(self, function: Any, num_blocks: int, *sizes: int) -> Any:
        """(params, state, *words) -> (state, what every shard has), for one array of int32 words of each size."""
        words = [self._words(size) for size in sizes]
        specs = (self.param_specs, STATE_SPECS, *(P() for _ in words))
        mapped = spmd(function, self.mesh, specs, (STATE_SPECS, P()))
        state = state_shapes(self.model, self.engine, self.mesh, num_blocks)
        return self._compile(jax.jit(mapped, donate_argnums=(1,)), self.param_shapes, state, *words)

    def set_row(self) -> Any:
        """``processors.set_row``, the state donated."""
        old = self.processor_shapes
        new = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), old)
        specs = jax.tree.map(lambda spec: P(*spec[1:]), PROCESSOR_SPECS, is_leaf=lambda leaf: isinstance(leaf, P))
        mapped = spmd(set_row, self.mesh, (PROCESSOR_SPECS, P(), specs), PROCESSOR_SPECS)
        row = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(mapped, donate_argnums=(0,)).lower(old, row, new).compile()

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding(self.mesh))

    def _compile(self, jitted: Any, *shapes: Any) -> Any:
        with TRACING:
            lowered = jitted.lower(*shapes)
        return lowered.compile(compiler_options=self.options)


def compile_in_threads(jobs: Mapping[Any, Callable[[Any], Any]]) -> dict[Any, Any]:
    """{key: jobs[key](key)}, side by side (XLA releases the GIL): buckets first, the largest of them first.

    Shows a progress bar on stderr if that is a terminal.
    """
    if not jobs:
        return {}
    ordered = sorted(jobs, key=lambda key: -key.num_tokens if isinstance(key, Bucket) else 0)
    workers = min(len(ordered), os.cpu_count() or 1)
    bar = tqdm(total=len(ordered), desc="Compiling", unit="step", disable=None)  # None: unless it is no terminal

    def counted(key: Any) -> Any:
        compiled = jobs[key](key)
        with bar.get_lock():
            bar.update()
        return compiled

    with bar, ThreadPoolExecutor(max_workers=workers) as pool:
        return dict(zip(ordered, pool.map(counted, ordered), strict=True))
