"""Compiles one function per bucket ahead of time and dispatches steps to it.

Ahead-of-time compilation takes the role of CUDA graphs: after warm-up every step calls a finished executable, and a
compile is a bug that is counted and logged. A step with logit processors or log-probabilities calls a second one, which
draws again from the logits of the first: one for each number of sequences, shared by the buckets. Owns: parameters,
device state, compiled functions. Must not know: requests, queues, tokens' meaning.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import draw_words, neutral_knobs
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import ResolvedBackends
from jaxvllm.models.params import Table
from jaxvllm.models.registry import param_table
from jaxvllm.runtime.compiler import Compiler, compile_in_threads
from jaxvllm.runtime.exchange import Exchange
from jaxvllm.runtime.mesh import TP
from jaxvllm.runtime.processors import ProcessorState
from jaxvllm.runtime.state import allocate_state, state_shapes
from jaxvllm.runtime.step import make_prompt_logprobs, make_score
from jaxvllm.runtime.weights import ParamPlacer

logger = logging.getLogger(__name__)


@functools.cache
def queue_of(device: Any) -> Lock:
    """Who holds a device's is the only one that dispatches to it together with other devices."""
    return Lock()


@contextmanager
def in_order(devices: Sequence[Any]) -> Iterator[None]:
    """Steps of engines in several threads come in one order on all the devices that they share.

    Shards wait for each other inside their kernels: for ever, if another engine's step came between on one device.
    """
    with ExitStack() as held:
        for device in devices:
            held.enter_context(queue_of(device))
        yield


@dataclass(slots=True)
class StepHandle:
    """A dispatched step: its tokens [B] are on their way to the host.

    logprobs: of a step that drew from processed logits, the arrays of ``gather_logprobs``; they travel, too.
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
                 table_width: int, exchange: Exchange | None = None) -> None:  # fmt: skip
        self.model, self.engine, self.mesh, self.backends, self.exchange = model, engine, mesh, backends, exchange
        self.table_width = table_width
        self.compiler = Compiler(model, engine, mesh, table, backends, exchange)
        self.placer = ParamPlacer(param_table(model), table, mesh, str(engine.dtype))
        self.params: dict[str, Any] = {}
        self.state: Any = None  # DeviceState, once started
        self.processors: Any = None  # ProcessorState, or None without processors
        self.num_blocks = 0
        self.num_compiles = 0
        self.compiles_after_warmup = 0
        self.compile_seconds = 0.0
        self._warm = False
        devices = sorted(mesh.devices.flat, key=lambda device: device.id)
        self._in_order = functools.partial(in_order, devices) if mesh.size > 1 else nullcontext  # one waits for nobody
        self._layouts: dict[Bucket, PlanLayout] = {}
        self._steps: dict[Bucket, Any] = {}
        self._redraws: dict[int, Any] = {}  # by the number of sequences
        self._logits: dict[int, Any] = {}  # the same: where steps of so many leave theirs
        self._scores: dict[Any, Any] = {}
        self._set_row: Any = None

    # Compilation

    def layout(self, bucket: Bucket) -> PlanLayout:
        """The layout of a bucket's plans."""
        if bucket not in self._layouts:
            drop_slot = self.num_blocks * self.engine.block_size  # slots at and past the pool's end are dropped
            self._layouts[bucket] = PlanLayout(bucket, self.table_width, self.engine.max_num_seqs, drop_slot)
        return self._layouts[bucket]

    def compile(self, num_blocks: int, buckets: Sequence[Bucket]) -> None:
        """Compiles the steps of ``buckets`` for a pool of ``num_blocks``, and their redraws; what is there stays.

        Before the pool is allocated: while it compiles, XLA times GEMM candidates on buffers of their real sizes, for
        which a GPU filled with cache blocks would have no room.
        """
        started = time.perf_counter()
        if num_blocks != self.num_blocks:
            self.num_blocks = num_blocks
            for made_for_another_pool in (self._layouts, self._steps, self._scores):
                made_for_another_pool.clear()
        steps = {bucket: self._compile_step for bucket in buckets if bucket not in self._steps}
        numbers = {bucket.num_seqs for bucket in buckets} if self.engine.enable_processors else set()
        redraws = {number: self.compiler.redraw for number in numbers if number not in self._redraws}
        made = compile_in_threads(steps | redraws)
        self._steps |= {bucket: made[bucket] for bucket in steps}
        self._redraws |= {number: made[number] for number in redraws}
        self.num_compiles += len(made)
        self.compile_seconds += time.perf_counter() - started

    def _compile_step(self, bucket: Bucket) -> Any:
        return self.compiler.step(self.layout(bucket), self.num_blocks)

    def transient_bytes(self) -> int:
        """The largest temporary memory of what is compiled, by XLA's own figures."""
        peaks = []
        for compiled in (*self._steps.values(), *self._redraws.values()):
            analysis = compiled.memory_analysis()
            peaks.append(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        return max(peaks, default=0)

    def start(self, wait: Callable[[jax.Array], None] | None = None) -> None:
        """Allocates the pool, then runs each compiled step once, on an empty plan, which writes nothing.

        wait: returns when an array is there, or raises where it never will be (another process has failed).
        From here on a compilation counts as one after warm-up, if the engine has one.
        """
        started = time.perf_counter()
        self.state = allocate_state(state_shapes(self.model, self.engine, self.mesh, self.num_blocks))
        self._logits.clear()
        if self.engine.enable_processors:
            self.processors = allocate_state(self.compiler.processor_shapes)
            self._set_row = self.compiler.set_row() if self._steps else None
        redraws = set(self._redraws)
        if self.mesh.size > 1:  # the smallest opens the way between devices; large ones that ran slow all steps by 3 %
            redraws = {min(redraws)} if redraws else set()
        for bucket in list(self._steps):
            layout = self.layout(bucket)
            words = draw_words(layout.views(layout.empty()), neutral_knobs(bucket.num_seqs))
            self.dispatch(bucket, layout.empty(), words if bucket.num_seqs in redraws else None)
        if wait is not None:
            for leaf in jax.tree.leaves((self.state, self.processors)):
                wait(leaf)
        jax.block_until_ready((self.state, self.processors))
        self.compile_seconds += time.perf_counter() - started
        self._warm = self.engine.warmup

    # Steps

    def dispatch(self, bucket: Bucket, buffer: np.ndarray, words: np.ndarray | None = None) -> StepHandle:
        """Starts a step and returns at once. ``buffer``: a plan of ``self.layout(bucket)``, not changed afterwards.

        words: int32 [num_seqs of the bucket, len(DRAW)], for a draw from processed logits; None: from the model's.
        """
        number = bucket.num_seqs
        if number not in self._logits:
            shape = self.compiler.logits_shape(number)
            self._logits[number] = None if shape is None else allocate_state(shape)
        compiled = self._compiled(self._steps, bucket, self._compile_step)
        with self._in_order():
            self.state, logits, tokens = compiled(self.params, self.state, self._logits[number], buffer, self.exchange)
        self._logits[number] = logits
        if words is None:
            tokens.copy_to_host_async()
            return StepHandle(tokens)
        redraw = self._compiled(self._redraws, number, self.compiler.redraw)
        states = self.state.last_tokens, self.processors
        with self._in_order():
            (last_tokens, self.processors), (tokens, *numbers) = redraw(states, logits, words)
        self.state = self.state.replace(last_tokens=last_tokens)
        for array in (tokens, *numbers):
            array.copy_to_host_async()
        return StepHandle(tokens, (numbers[0], numbers[1]))

    def _compiled[Key](self, known: dict[Key, Any], key: Key, compile_one: Callable[[Key], Any]) -> Any:
        compiled = known.get(key)
        if compiled is None:
            started = time.perf_counter()
            compiled = known[key] = compile_one(key)
            self.num_compiles += 1
            self.compile_seconds += time.perf_counter() - started
            if self._warm:
                self.compiles_after_warmup += 1
                logger.warning("compiled %s after warm-up: this is a bug, please report it", key)
        return compiled

    def set_processor_row(self, row: int, new: ProcessorState) -> None:
        """Replaces what the processors know about a row, after all steps dispatched so far. new: ``host_row``."""
        if self._set_row is None:
            self._set_row = self.compiler.set_row()
        self.processors = self._set_row(self.processors, np.int32(row), new)

    def _compiled_score(self, key: Any, layout: PlanLayout, function: Any) -> Any:
        if key not in self._scores:
            sizes = layout.size, layout.bucket.num_tokens
            self._scores[key] = self.compiler.forward(function, self.num_blocks, *sizes)
        return self._scores[key]

    def prompt_logprobs(self, bucket: Bucket, buffer: np.ndarray, targets: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """As ``score``, with the most probable tokens: float32 and int32 [T, 1 + max_logprobs], on their way."""
        layout = self.layout(bucket)
        function = make_prompt_logprobs(layout, self.model, self.engine, self.backends, TP)
        compiled = self._compiled_score((bucket, "prompt"), layout, function)
        with self._in_order():
            self.state, numbers = compiled(self.params, self.state, buffer, targets)
        for array in numbers:
            array.copy_to_host_async()
        return numbers

    def score(self, bucket: Bucket, buffer: np.ndarray, targets: np.ndarray) -> jax.Array:
        """log p(targets[t] | tokens up to t) for the packed tokens of one ragged plan: float32 [T], on their way.

        targets: int32 [T]. Compiled at a bucket's first use; not counted as a compile after warm-up.
        """
        layout = self.layout(bucket)
        function = make_score(layout, self.model, self.backends, TP)
        compiled = self._compiled_score(bucket, layout, function)
        with self._in_order():
            self.state, logprobs = compiled(self.params, self.state, buffer, targets)
        return logprobs

    def compiled_text(self, key: Bucket | int) -> str:
        """HLO text of a bucket's step, or of the redraw of so many sequences (tests read it: no cache-shaped copy)."""
        return (self._redraws[key] if isinstance(key, int) else self._steps[key]).as_text()

    def close(self) -> None:
        """Gives the device memory back."""
        for leaf in jax.tree.leaves((self.params, self.state, self.processors, self._logits, self.exchange)):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.params, self.state, self.processors, self.exchange = {}, None, None, None
        for compiled in (self._steps, self._redraws, self._scores, self._logits):
            compiled.clear()
