"""What the engine does once: buckets, loading, memory, compilation.

Part of the engine's room (it may import every other one), apart from the loop so that the loop reads in one sitting.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxvllm import __version__
from jaxvllm import config as configuration
from jaxvllm.config import ConfigError, EngineConfig, ModelConfig
from jaxvllm.core.buckets import BucketTable, default_decode_sizes, default_token_sizes
from jaxvllm.core.policy import rule_problems
from jaxvllm.core.rules import Rules
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.distributed import Alone, Follower, Leader
from jaxvllm.kernels import resolve_backend
from jaxvllm.models import params as tables
from jaxvllm.models.registry import param_table
from jaxvllm.runtime.exchange import make_exchange
from jaxvllm.runtime.executor import Executor
from jaxvllm.runtime.memory import choose_num_blocks
from jaxvllm.runtime.mesh import check_mesh, make_mesh
from jaxvllm.runtime.upload import open_upload
from jaxvllm.runtime.weights import make_place, random_params
from jaxvllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GivenModel:
    """A model that is in memory already: ``Engine.from_params``' arguments."""

    config: ModelConfig
    params: Mapping[str, Any]
    tokenizer: Tokenizer | None
    donate: bool


def bucket_table(engine: EngineConfig) -> BucketTable:
    """The engine's buckets: the given sizes, or the defaults; each table must reach its limit."""
    decode = sorted(engine.decode_buckets or default_decode_sizes(engine.max_num_seqs))
    tokens = sorted(engine.token_buckets or default_token_sizes(engine.max_num_batched_tokens))
    for name, sizes, field, limit in (
        ("decode_buckets", decode, "max_num_seqs", engine.max_num_seqs),
        ("token_buckets", tokens, "max_num_batched_tokens", engine.max_num_batched_tokens),
    ):
        if sizes[-1] != limit:
            raise ConfigError(f"{name} ends at {sizes[-1]}, but a full step has {field}={limit}: make them equal")
    return BucketTable(decode, tokens, engine.max_num_seqs)


def scheduling_rules(engine: EngineConfig) -> Rules:
    """What the engine asked of its scheduling policy; ConfigError, before anything is loaded, if it can't have it."""
    try:
        rules = Rules(**{name: getattr(engine, name) for name in Rules.__dataclass_fields__})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    problems = rule_problems(engine.scheduling_policy, rules)
    length, budget = engine.max_model_len or 1, engine.max_num_batched_tokens
    if not rules.enable_chunked_prefill and budget < length - 1:
        problems.append(
            f"enable_chunked_prefill=False keeps prompts whole, so max_num_batched_tokens={budget} must be at least "
            f"max_model_len - 1 = {length - 1}: raise the first or lower the second"
        )
    if problems:
        raise ConfigError("; ".join(problems))
    return rules


def make_scheduler(engine: EngineConfig, rules: Rules) -> Scheduler:
    """The scheduler of a resolved configuration. No request is admitted without a row on the device."""
    assert engine.num_blocks is not None and engine.max_model_len is not None
    return Scheduler(
        block_size=engine.block_size, num_blocks=engine.num_blocks, max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens, max_model_len=engine.max_model_len,
        max_running=engine.max_num_seqs, scheduling_policy=engine.scheduling_policy, rules=rules,
        enable_prefix_caching=engine.enable_prefix_caching,
    )  # fmt: skip


def checkpoint_path(model: object) -> Path:
    """``Engine``'s first argument where it isn't a model already. Raises ConfigError."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a checkpoint's directory, or a ModelConfig for random weights"
        )
    if not os.fspath(model):
        raise ConfigError("model='' is empty; give a folder that holds config.json")
    return Path(model)


def num_shards(asked: int | None, mesh: Mesh | None) -> int:
    """tensor_parallel_size: as asked, or the mesh's, which must agree. Starts no backend."""
    if mesh is None:
        return 1 if asked is None else asked
    check_mesh(mesh)
    if asked is not None and (type(asked) is not int or asked != mesh.size):  # True is no 1
        raise ConfigError(f"tensor_parallel_size={asked!r}, but the mesh has {mesh.size} devices: leave one out")
    return mesh.size


def choose_mesh(engine: EngineConfig, mesh: Mesh | None) -> Mesh:
    """The engine's own mesh, of one axis: over the devices of ``mesh``, or the first ones."""
    prepare_backend(engine)
    return make_mesh(engine.tensor_parallel_size, None if mesh is None else list(mesh.devices.flat))


def join_group(mesh: Mesh, model: ModelConfig, engine: EngineConfig, end_tokens: Iterable[int]) -> Alone:
    """This process's part in the engine, once all processes of the mesh are here with the same options.

    Processes that share several engines make them in the same order.
    """
    facts = engine.to_dict() | {
        "model": asdict(model), "end_tokens": sorted(end_tokens), "jax": jax.__version__, "jaxvllm": __version__,
        "devices of the mesh": [device.id for device in mesh.devices.flat],
    }  # fmt: skip
    me, processes = jax.process_index(), sorted({device.process_index for device in mesh.devices.flat})
    if me not in processes:
        raise ConfigError(
            f"mesh has devices of processes {processes} only, but this is process {me}: make this Engine in those "
            "processes alone, or pass a mesh with a device of each"
        )
    if len(processes) == 1:
        return Alone()
    # The public multihost_utils would send values through the devices, in step with what runs there.
    from jax._src.distributed import global_state

    client: Any = global_state.client
    assert client is not None, "several processes without jax.distributed"
    held = []
    for device in mesh.local_devices:
        key = f"jaxvllm/open/{device.id}"
        try:
            client.key_value_set(key, "")
        except jax.errors.JaxRuntimeError as error:
            for taken in held:
                client.key_value_delete(taken)
            if "ALREADY_EXISTS" not in str(error):
                raise
            raise ConfigError(
                f"an engine over several processes is open on device {device.id}, and a process follows one at a time: "
                "close it in all processes first, or pass a mesh of other devices"
            ) from None
        held.append(key)
    place = f"jaxvllm/{'-'.join(map(str, processes))}"
    number = client.key_value_increment(f"{place}/engines/{me}", 1)
    role = Leader if me == processes[0] else Follower
    return role(client, me, processes, f"{place}/{number}/", facts, held)


def make_executor(model: ModelConfig, engine: EngineConfig, buckets: BucketTable, source: Path | GivenModel | None,
                  mesh: Mesh, group: Alone) -> Executor:  # fmt: skip
    """Puts the model onto the mesh (None: random weights), sizes the pool, allocates it and compiles every bucket."""
    try:
        return _make_executor(model, engine, buckets, source, mesh, group)
    except BaseException as error:
        group.fail(error)
        raise


def _make_executor(model: ModelConfig, engine: EngineConfig, buckets: BucketTable, source: Path | GivenModel | None,
                   mesh: Mesh, group: Alone) -> Executor:  # fmt: skip
    table = param_table(model, tp=mesh.size)
    device = mesh.devices.flat[0]
    assert engine.dtype is not None and engine.max_model_len is not None
    backends = resolve_backend(
        engine.attention_backend, platform=device.platform, device_kind=device.device_kind, head_dim=model.head_dim,
        block_size=engine.block_size, dtype=engine.dtype,
        compute_capability=str(getattr(device, "compute_capability", "")), invariant=engine.batch_invariant,
    )  # fmt: skip
    if backends.reason:
        named = engine.attention_backend != "auto"  # then there is a reason only when it gave way
        logger.log(logging.WARNING if named else logging.INFO, "attention: %s", backends.reason)
    table_width = -(-engine.max_model_len // engine.block_size)
    exchange = make_exchange(mesh, model, engine, backends)
    executor = Executor(model, engine, mesh, table, backends, table_width, exchange)
    started = time.perf_counter()
    if isinstance(source, GivenModel):
        placed = executor.placer.place(source.params, donate=source.donate)
    else:
        placed = load(source, table, mesh, engine)
    executor.params = tables.nest(placed)
    jax.block_until_ready(executor.params)
    logger.info("weights: %.2f GB in %.1f s", tables.param_bytes(table, configuration.DTYPE_BYTES[engine.dtype]) / 1e9,
                time.perf_counter() - started)  # fmt: skip
    num_blocks = engine.num_blocks
    if num_blocks is None:
        num_blocks = choose_num_blocks(executor, buckets, group.smallest)
    num_blocks = group.smallest(num_blocks)  # all are here: none waits in a step for one whose weights didn't load
    executor.compile(num_blocks, buckets.all if engine.warmup else ())
    executor.start(group.wait)
    if engine.warmup:
        logger.info("compiled %d steps in %.1f s", executor.num_compiles, executor.compile_seconds)
    return executor


def load(path: Path | None, table: tables.Table, mesh: Any, engine: EngineConfig) -> Mapping[str, jax.Array]:
    """Parameters by path: from a checkpoint directory, or random ones (path None)."""
    assert engine.dtype is not None
    if path is None:
        return random_params(table, mesh, engine.dtype, engine.seed)
    from jaxvllm.convert import load_shards

    on_host = mesh.devices.flat[0].platform == "cpu"  # its arrays may alias what was read
    with open_upload(mesh.local_devices) or nullcontext() as upload:
        return load_shards(path, table, dtype=engine.dtype, place=make_place(mesh, upload), keeps=on_host)


def stats(scheduler: Scheduler, executor: Executor, start_seconds: float) -> dict[str, Any]:
    """``Engine.stats``."""
    stats: dict[str, Any] = {"steps": scheduler.counters.steps, **asdict(scheduler.counters)}
    stats["num_waiting"], stats["num_running"] = scheduler.num_waiting, scheduler.num_running
    stats["num_blocks"], stats["blocks_free"] = scheduler.pool.num_blocks, scheduler.pool.num_free
    stats["attention_backend"] = executor.backends.decode_attention
    stats["compiles"] = executor.num_compiles
    stats["compiles_after_warmup"] = executor.compiles_after_warmup
    stats["compile_seconds"] = round(executor.compile_seconds, 3)
    stats["start_seconds"] = round(start_seconds, 3)
    return stats


def prepare_backend(engine: EngineConfig) -> None:
    """Before jax's backend starts: its share of GPU memory. Always: where compiled steps are kept."""
    from jax._src import xla_bridge  # no public way to ask without starting it

    if not xla_bridge.backends_are_initialized():
        configuration.set_backend_memory_fraction(engine.gpu_memory_utilization)
    cache = configuration.compilation_cache_dir()
    if cache is not None and jax.config.jax_compilation_cache_dir is None and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
