"""Engines of one process share what was compiled: tracing and lowering a step again takes as long as compiling it.

A program is kept by all that its compilation can read: the model, the mesh, the backends, the bucket's layout, the
pool's size, and the engine's configuration but for the fields of HOST_ONLY, which are the scheduler's matter. That
they are is checked where a program is compiled: who reads one of them there gets an error. Engines, their states and
their counts of compilations stay their own. What a test changes in a module is part of the key, too: PARTS_TOKENS.

The suite compiles at level 0, which is quick to compile and slow to run. The steps of an engine that runs hundreds of
them are compiled at level 1.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from jax.sharding import Mesh

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.plan import PlanLayout
from jaxvllm.runtime import executor, step
from jaxvllm.runtime.compiler import Compiler

HOST_ONLY = frozenset({
    "num_blocks", "max_num_batched_tokens", "gpu_memory_utilization", "scheduling_policy", "policy",
    "long_prefill_token_threshold", "reserve_full_prompt", "enable_chunked_prefill", "share_prefixes",
    "enable_prefix_caching", "seed", "async_steps", "decode_buckets", "token_buckets", "generation_config", "warmup",
})  # fmt: skip
_kept: dict[Any, Any] = {}
_lock = threading.Lock()


class _Narrow:
    """An engine's configuration without the fields of HOST_ONLY."""

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        assert name not in HOST_ONLY, f"a program depends on {name}: take it out of tests/kept_programs.py's HOST_ONLY"
        return getattr(self._engine, name)


def _key(value: Any) -> Any:
    """What is equal for values that compile to the same."""
    if isinstance(value, _Narrow):
        engine = value._engine
        return tuple((f.name, getattr(engine, f.name)) for f in fields(engine) if f.name not in HOST_ONLY)
    if isinstance(value, Mesh):
        return value.axis_names, value.devices.shape, tuple(device.id for device in value.devices.flat)
    if isinstance(value, PlanLayout):
        return value.bucket, value.table_width, value.max_rows, value.drop_slot, value.query_tile
    if isinstance(value, EngineConfig):
        return _key(_Narrow(value))
    if callable(value):  # a function to compile: its code and what it closes over
        return value.__code__, tuple(_key(cell.cell_contents) for cell in value.__closure__ or ())
    assert isinstance(value, int | str) or value is None or is_dataclass(value), value
    return value


class _KeepingCompiler(Compiler):
    level = 0

    def __init__(self, model: ModelConfig, engine: EngineConfig, *others: Any) -> None:
        super().__init__(model, _Narrow(engine), *others)  # type: ignore[arg-type]

    def _keep(self, name: str, *args: Any) -> Any:
        own = self.model, self.engine, self.mesh, self.backends
        key = name, self.level, step.PARTS_TOKENS, tuple(_key(value) for value in (*own, *args))
        with _lock:
            found = _kept.get(key)
        if found is None:
            found = getattr(Compiler, name)(self, *args)  # without the lock: steps compile side by side
            with _lock:
                _kept[key] = found
        return found

    def step(self, *args: Any) -> Any:
        return self._keep("step", *args)

    def redraw(self, *args: Any) -> Any:
        return self._keep("redraw", *args)

    def _compile(self, jitted: Any, *shapes: Any) -> Any:
        options = self.options or {}
        if self.level and not self.on_gpu and jitted.__name__ in ("step", "redraw"):
            options = options | {"xla_backend_optimization_level": self.level}
        return jitted.lower(*shapes).compile(compiler_options=options or None)

    def forward(self, *args: Any) -> Any:
        return self._keep("forward", *args)

    def set_row(self, *args: Any) -> Any:
        return self._keep("set_row", *args)


class _ForManySteps(_KeepingCompiler):
    level = 1


@contextlib.contextmanager
def kept_programs(*, many_steps: bool = False) -> Iterator[None]:
    """Engines made inside take what others compiled, and leave what they compile."""
    before = executor.Compiler
    executor.Compiler = _ForManySteps if many_steps else _KeepingCompiler  # type: ignore[misc]
    try:
        yield
    finally:
        executor.Compiler = before  # type: ignore[misc]
