"""Compiles one function per bucket ahead of time and dispatches steps to it.

Ahead-of-time compilation takes the role of CUDA graphs: after warm-up every step calls a finished executable, and a
compile is a bug that is counted and logged. Owns: parameters, device state, compiled functions. Must not know:
requests, queues, tokens' meaning.
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
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.models.params import Table, nest
from jaxvllm.runtime.mesh import TP, sharding, spmd
from jaxvllm.runtime.state import STATE_SPECS, allocate_state, state_shapes
from jaxvllm.runtime.step import make_score, make_step

logger = logging.getLogger(__name__)

# XLA's rematerialisation counts an updated cache as a new one, believes that 369 GB are needed and recomputes what it
# can: a slice of the plan in every layer, 28 launches of 1.1 us. What a step really needs is measured (memory.py).
GPU_OPTIONS = {"xla_gpu_memory_limit_slop_factor": "100000"}


@dataclass(slots=True)
class StepHandle:
    """A dispatched step: its tokens [B] are on their way to the host."""

    tokens: jax.Array

    def result(self) -> np.ndarray:
        """Waits for the step and returns its tokens, int32 [B] (padded rows included)."""
        return np.asarray(self.tokens)


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
        self.params: dict[str, Any] = {}
        self.state: Any = None  # DeviceState, once started
        self.num_blocks = 0
        self.num_compiles = 0
        self.compiles_after_warmup = 0
        self.compile_seconds = 0.0
        self._warm = False
        self._layouts: dict[Bucket, PlanLayout] = {}
        self._steps: dict[Bucket, Any] = {}
        self._scores: dict[Bucket, Any] = {}

    # Compilation

    def layout(self, bucket: Bucket) -> PlanLayout:
        """The layout of a bucket's plans."""
        if bucket not in self._layouts:
            self._layouts[bucket] = self._make_layout(bucket, self.num_blocks)
        return self._layouts[bucket]

    def _make_layout(self, bucket: Bucket, num_blocks: int) -> PlanLayout:
        # slots at and past the pool's end are dropped
        return PlanLayout(bucket, self.table_width, self.engine.max_num_seqs, num_blocks * self.engine.block_size)

    def compile_step(self, bucket: Bucket, num_blocks: int) -> Any:
        """Compiles the bucket's step for a pool of ``num_blocks``; nothing is stored."""
        layout = self._make_layout(bucket, num_blocks)
        return self._compile(make_step(layout, self.model, self.backends, TP), layout, num_blocks, ())

    def _compile(self, function: Any, layout: PlanLayout, num_blocks: int, extra: tuple[Any, ...]) -> Any:
        specs = (self.param_specs, STATE_SPECS, P(), *(P() for _ in extra))
        mapped = spmd(function, self.mesh, specs, (STATE_SPECS, P()))
        replicated = sharding(self.mesh)
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=replicated)
        state = state_shapes(self.model, self.engine, self.mesh, num_blocks)
        lowered = jax.jit(mapped, donate_argnums=(1,)).lower(self._param_shapes, state, buffer, *extra)
        on_gpu = self.mesh.devices.flat[0].platform == "gpu"
        return lowered.compile(compiler_options=GPU_OPTIONS if on_gpu else None)

    def start(self, num_blocks: int, buckets: Sequence[Bucket]) -> None:
        """Compiles ``buckets`` for a pool of ``num_blocks``, then allocates the pool, then runs each once.

        In this order: while it compiles, XLA times GEMM candidates on buffers of their real sizes, for which a GPU
        filled with cache blocks would have no room. The first runs are on empty plans, which write nothing.
        """
        started = time.perf_counter()
        self.num_blocks = num_blocks
        for made_for_another_pool in (self._layouts, self._steps, self._scores):
            made_for_another_pool.clear()
        self._steps |= compile_in_threads(lambda b: self.compile_step(b, num_blocks), buckets)
        self.num_compiles += len(buckets)
        self.state = allocate_state(state_shapes(self.model, self.engine, self.mesh, num_blocks))
        for bucket in buckets:
            self.dispatch(bucket, self.layout(bucket).empty())
        jax.block_until_ready(self.state)
        self.compile_seconds += time.perf_counter() - started
        self._warm = bool(buckets)

    # Steps

    def dispatch(self, bucket: Bucket, buffer: np.ndarray) -> StepHandle:
        """Starts a step and returns at once. ``buffer``: a plan of ``self.layout(bucket)``, not changed afterwards."""
        compiled = self._steps.get(bucket)
        if compiled is None:
            started = time.perf_counter()
            compiled = self._steps[bucket] = self.compile_step(bucket, self.num_blocks)
            self.num_compiles += 1
            self.compile_seconds += time.perf_counter() - started
            if self._warm:
                self.compiles_after_warmup += 1
                logger.warning("compiled %s after warm-up: this is a bug, please report it", bucket)
        self.state, tokens = compiled(self.params, self.state, buffer)
        tokens.copy_to_host_async()
        return StepHandle(tokens)

    def score(self, bucket: Bucket, buffer: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """log p(targets[t] | tokens up to t) for the packed tokens of one ragged plan: float32 [T].

        targets: int32 [T]. Compiled at a bucket's first use; not counted as a compile after warm-up.
        """
        compiled = self._scores.get(bucket)
        if compiled is None:
            layout = self.layout(bucket)
            extra = (jax.ShapeDtypeStruct((bucket.num_tokens,), jnp.int32, sharding=sharding(self.mesh)),)
            function = make_score(layout, self.model, self.backends, TP)
            compiled = self._scores[bucket] = self._compile(function, layout, self.num_blocks, extra)
        self.state, logprobs = compiled(self.params, self.state, buffer, targets)
        return np.asarray(logprobs)

    def compiled_text(self, bucket: Bucket) -> str:
        """The compiled step's HLO text (tests read it: no cache-shaped copy)."""
        return self._steps[bucket].as_text()

    def close(self) -> None:
        """Gives the device memory back."""
        for leaf in jax.tree.leaves((self.params, self.state)):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.params, self.state = {}, None
        self._steps.clear()
        self._scores.clear()


def compile_in_threads(compile_one: Any, buckets: Sequence[Bucket]) -> dict[Bucket, Any]:
    """Compiles the buckets side by side (XLA releases the GIL), the largest first; {bucket: compiled}.

    Shows a progress bar on stderr if that is a terminal.
    """
    if not buckets:
        return {}
    ordered = sorted(buckets, key=lambda b: -b.num_tokens)
    workers = min(len(ordered), os.cpu_count() or 1)
    bar = tqdm(total=len(ordered), desc="Compiling", unit="bucket", disable=None)  # None: unless it is no terminal

    def counted(bucket: Bucket) -> Any:
        compiled = compile_one(bucket)
        with bar.get_lock():
            bar.update()
        return compiled

    with bar, ThreadPoolExecutor(max_workers=workers) as pool:
        return dict(zip(ordered, pool.map(counted, ordered), strict=True))
