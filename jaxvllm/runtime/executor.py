"""Compiles one function per bucket ahead of time and dispatches steps to it.

Ahead-of-time compilation takes the role of CUDA graphs: after warm-up every step calls a finished executable, and a
compile is a bug that is counted and logged. Each bucket has two variants: plain, and processed (with logit
processors and log-probabilities). Owns: parameters, device state, compiled functions. Must not know: requests, queues,
tokens' meaning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import KNOBS, neutral_knobs
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.models.params import Table, nest
from jaxvllm.models.registry import param_table
from jaxvllm.runtime.mesh import TP, sharding, spmd
from jaxvllm.runtime.processed_step import make_processed_step, make_prompt_logprobs
from jaxvllm.runtime.processors import PROCESSOR_SPECS, ProcessorState, processor_shapes, set_row
from jaxvllm.runtime.state import STATE_SPECS, allocate_state, state_shapes
from jaxvllm.runtime.step import make_score, make_step
from jaxvllm.runtime.weights import ParamPlacer

logger = logging.getLogger(__name__)

Variant = tuple[Bucket, bool]  # whether it is the processed one

# XLA's rematerialisation counts an updated cache as a new one, believes that 369 GB are needed and recomputes what it
# can: a slice of the plan in every layer, 28 launches of 1.1 us. What a step really needs is measured (memory.py).
GPU_OPTIONS = {"xla_gpu_memory_limit_slop_factor": "100000"}
# Else a bfloat16 that goes on inside a fusion keeps float32's bits, and what is fused depends on the step's shape.
INVARIANT_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(slots=True)
class StepHandle:
    """A dispatched step: its tokens [B] are on their way to the host.

    logprobs: of a processed step, the arrays of ``gather_logprobs``; they travel, too.
    """

    tokens: jax.Array
    logprobs: tuple[jax.Array, jax.Array] | None = None

    def result(self) -> np.ndarray:
        """Waits for the step and returns its tokens, int32 [B] (padded rows included)."""
        return np.asarray(self.tokens)

    def logprobs_result(self) -> tuple[np.ndarray, np.ndarray]:
        """The same for a processed step's log-probabilities: float32 and int32 [B, 1 + max_logprobs]."""
        assert self.logprobs is not None
        return np.asarray(self.logprobs[0]), np.asarray(self.logprobs[1])


class Executor:
    """Runs plans of known buckets over one mesh; one donated device state is threaded through all steps."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, mesh: Mesh, table: Table, backends: ResolvedBackends,
                 table_width: int) -> None:  # fmt: skip
        self.model, self.engine, self.mesh, self.backends = model, engine, mesh, backends
        self.table_width = table_width
        self.param_specs = nest({path: P(*info.axes) for path, info in table.items()})
        dtype = jnp.dtype(engine.dtype)
        self._param_shapes = nest(
            {path: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding(mesh, info.axes))
             for path, info in table.items()}
        )  # fmt: skip
        self.placer = ParamPlacer(param_table(model), table, mesh, str(engine.dtype))
        self.params: dict[str, Any] = {}
        self.state: Any = None  # DeviceState, once started
        self.processors: Any = None  # ProcessorState, or None without processors
        self.num_blocks = 0
        self.num_compiles = 0
        self.compiles_after_warmup = 0
        self.compile_seconds = 0.0
        self._warm = False
        self._layouts: dict[Bucket, PlanLayout] = {}
        self._steps: dict[Variant, Any] = {}
        self._scores: dict[Any, Any] = {}
        self._set_row: Any = None

    # Compilation

    def layout(self, bucket: Bucket) -> PlanLayout:
        """The layout of a bucket's plans."""
        if bucket not in self._layouts:
            self._layouts[bucket] = self._make_layout(bucket, self.num_blocks)
        return self._layouts[bucket]

    def _make_layout(self, bucket: Bucket, num_blocks: int) -> PlanLayout:
        # slots at and past the pool's end are dropped
        return PlanLayout(bucket, self.table_width, self.engine.max_num_seqs, num_blocks * self.engine.block_size)

    @property
    def processor_shapes(self) -> ProcessorState:
        """The processors' state as ShapeDtypeStructs."""
        return processor_shapes(self.mesh, self.engine.max_num_seqs, self.model.vocab_size)

    @property
    def _on_gpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "gpu"

    def compile_step(self, variant: Variant, num_blocks: int) -> Any:
        """Compiles one variant of a bucket's step for a pool of ``num_blocks``; nothing is stored."""
        bucket, processed = variant
        layout = self._make_layout(bucket, num_blocks)
        state = state_shapes(self.model, self.engine, self.mesh, num_blocks)
        if not processed:
            return self._compile(make_step(layout, self.model, self.backends, TP), layout, state, STATE_SPECS, ())
        step = make_processed_step(layout, self.model, self.engine, self.backends, TP, unroll=self._on_gpu)
        knobs = jax.ShapeDtypeStruct((bucket.num_seqs, len(KNOBS)), jnp.int32, sharding=sharding(self.mesh))
        states, specs = (state, self.processor_shapes), (STATE_SPECS, PROCESSOR_SPECS)
        return self._compile(step, layout, states, specs, (knobs,))

    def _compile(self, function: Any, layout: PlanLayout, state: Any, state_specs: Any, extra: tuple[Any, ...]) -> Any:
        specs = (self.param_specs, state_specs, P(), *(P() for _ in extra))
        mapped = spmd(function, self.mesh, specs, (state_specs, P()))
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=sharding(self.mesh))
        lowered = jax.jit(mapped, donate_argnums=(1,)).lower(self._param_shapes, state, buffer, *extra)
        options = (GPU_OPTIONS if self._on_gpu else {}) | (INVARIANT_OPTIONS if self.backends.invariant else {})
        return lowered.compile(compiler_options=options or None)

    def _compile_set_row(self) -> Any:
        old = self.processor_shapes
        new = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), old)
        specs = jax.tree.map(lambda spec: P(*spec[1:]), PROCESSOR_SPECS, is_leaf=lambda leaf: isinstance(leaf, P))
        mapped = spmd(set_row, self.mesh, (PROCESSOR_SPECS, P(), specs), PROCESSOR_SPECS)
        row = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(mapped, donate_argnums=(0,)).lower(old, row, new).compile()

    @property
    def variants(self) -> tuple[bool, ...]:
        """Plain (False) and, unless the engine does without, processed (True)."""
        return (False, True) if self.engine.enable_processors else (False,)

    def start(self, num_blocks: int, buckets: Sequence[Bucket]) -> None:
        """Compiles ``buckets`` for a pool of ``num_blocks``, then allocates the pool, then runs each once.

        In this order: while it compiles, XLA times GEMM candidates on buffers of their real sizes, for which a GPU
        filled with cache blocks would have no room. The first runs are on empty plans, which write nothing.
        """
        variants = [(bucket, processed) for bucket in buckets for processed in self.variants]
        started = time.perf_counter()
        self.num_blocks = num_blocks
        for made_for_another_pool in (self._layouts, self._steps, self._scores):
            made_for_another_pool.clear()
        self._steps |= compile_in_threads(lambda v: self.compile_step(v, num_blocks), variants)
        self.num_compiles += len(variants)
        self.state = allocate_state(state_shapes(self.model, self.engine, self.mesh, num_blocks))
        if self.engine.enable_processors:
            self.processors = allocate_state(self.processor_shapes)
            self._set_row = self._compile_set_row() if variants else None
        for bucket, processed in variants:
            knobs = neutral_knobs(bucket.num_seqs) if processed else None
            self.dispatch(bucket, self.layout(bucket).empty(), knobs)
        jax.block_until_ready((self.state, self.processors))
        self.compile_seconds += time.perf_counter() - started
        self._warm = bool(buckets)

    # Steps

    def dispatch(self, bucket: Bucket, buffer: np.ndarray, knobs: np.ndarray | None = None) -> StepHandle:
        """Starts a step and returns at once. ``buffer``: a plan of ``self.layout(bucket)``, not changed afterwards.

        knobs: int32 [num_seqs of the bucket, len(KNOBS)], for the processed variant; None: the plain one.
        """
        compiled = self._compiled((bucket, knobs is not None))
        if knobs is None:
            self.state, tokens = compiled(self.params, self.state, buffer)
            tokens.copy_to_host_async()
            return StepHandle(tokens)
        states = (self.state, self.processors)
        (self.state, self.processors), (tokens, *numbers) = compiled(self.params, states, buffer, knobs)
        for array in (tokens, *numbers):
            array.copy_to_host_async()
        return StepHandle(tokens, (numbers[0], numbers[1]))

    def _compiled(self, variant: Variant) -> Any:
        compiled = self._steps.get(variant)
        if compiled is None:
            started = time.perf_counter()
            compiled = self._steps[variant] = self.compile_step(variant, self.num_blocks)
            self.num_compiles += 1
            self.compile_seconds += time.perf_counter() - started
            if self._warm:
                self.compiles_after_warmup += 1
                logger.warning("compiled %s after warm-up: this is a bug, please report it", variant[0])
        return compiled

    def set_processor_row(self, row: int, new: ProcessorState) -> None:
        """Replaces what the processors know about a row, after all steps dispatched so far. new: ``host_row``."""
        if self._set_row is None:
            self._set_row = self._compile_set_row()
        self.processors = self._set_row(self.processors, np.int32(row), new)

    def _compiled_score(self, key: Any, layout: PlanLayout, function: Any) -> Any:
        compiled = self._scores.get(key)
        if compiled is None:
            state = state_shapes(self.model, self.engine, self.mesh, self.num_blocks)
            shape = (layout.bucket.num_tokens,)
            targets = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding(self.mesh))
            compiled = self._scores[key] = self._compile(function, layout, state, STATE_SPECS, (targets,))
        return compiled

    def prompt_logprobs(self, bucket: Bucket, buffer: np.ndarray, targets: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """As ``score``, with the most probable tokens: float32 and int32 [T, 1 + max_logprobs], on their way."""
        layout = self.layout(bucket)
        function = make_prompt_logprobs(layout, self.model, self.engine, self.backends, TP)
        compiled = self._compiled_score((bucket, "prompt"), layout, function)
        self.state, numbers = compiled(self.params, self.state, buffer, targets)
        for array in numbers:
            array.copy_to_host_async()
        return numbers

    def score(self, bucket: Bucket, buffer: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """log p(targets[t] | tokens up to t) for the packed tokens of one ragged plan: float32 [T].

        targets: int32 [T]. Compiled at a bucket's first use; not counted as a compile after warm-up.
        """
        layout = self.layout(bucket)
        function = make_score(layout, self.model, self.backends, TP)
        compiled = self._compiled_score(bucket, layout, function)
        self.state, logprobs = compiled(self.params, self.state, buffer, targets)
        return np.asarray(logprobs)

    def compiled_text(self, bucket: Bucket, processed: bool = False) -> str:
        """The compiled step's HLO text (tests read it: no cache-shaped copy)."""
        return self._steps[bucket, processed].as_text()

    def close(self) -> None:
        """Gives the device memory back."""
        for leaf in jax.tree.leaves((self.params, self.state, self.processors)):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.params, self.state, self.processors = {}, None, None
        self._steps.clear()
        self._scores.clear()


def compile_in_threads(compile_one: Any, variants: Sequence[Variant]) -> dict[Variant, Any]:
    """Compiles the steps side by side (XLA releases the GIL), the largest first; {variant: compiled}.

    Shows a progress bar on stderr if that is a terminal.
    """
    if not variants:
        return {}
    ordered = sorted(variants, key=lambda v: -v[0].num_tokens)
    workers = min(len(ordered), os.cpu_count() or 1)
    bar = tqdm(total=len(ordered), desc="Compiling", unit="step", disable=None)  # None: unless it is no terminal

    def counted(variant: Variant) -> Any:
        compiled = compile_one(variant)
        with bar.get_lock():
            bar.update()
        return compiled

    with bar, ThreadPoolExecutor(max_workers=workers) as pool:
        return dict(zip(ordered, pool.map(counted, ordered), strict=True))
