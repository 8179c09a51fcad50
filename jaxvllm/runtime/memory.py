"""How many KV blocks fit: budget - what is used - the largest step's transient peak, in coarse steps.

The pool's size is part of every compiled shape, and the transient peak is XLA's own figure once that is compiled: so a
first size comes from an estimate, and another only where the figure says that it was wrong. Owns: this arithmetic.
Must not know: what the blocks are for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxvllm.config import DTYPE_BYTES, ConfigError, EngineConfig, ModelConfig, backend_memory_fraction
from jaxvllm.core.buckets import BucketTable
from jaxvllm.runtime.executor import Executor
from jaxvllm.runtime.processors import processor_bytes
from jaxvllm.runtime.state import kv_block_bytes

logger = logging.getLogger(__name__)

HOST_POOL_BYTES = 1 << 30  # a CPU has no device memory to measure: at most this much
STEPS_OF_BUDGET = 128  # the count is a compile-time shape: a few MB of difference must not miss the compilation cache
ENOUGH = 0.02  # of the budget: less isn't worth compiling again for
ATTEMPTS = 4
MARGIN = 0.01  # of the budget, for what the allocator loses between pieces


def choose_num_blocks(executor: Executor, buckets: BucketTable, smallest: Callable[[int], int] = int) -> int:
    """The number of blocks for ``executor``'s model; its parameters are already on the devices.

    Compiles for that number: all buckets, or without warm-up only the largest of each kind. smallest: the least of a
    value in all processes that share the model; with it they all find, and compile for, the same number.

    Raises ConfigError when not even one sequence of max_model_len fits.
    """
    model, engine, mesh = executor.model, executor.engine, executor.mesh
    block_bytes = kv_block_bytes(model, engine, mesh.size)
    assert engine.max_model_len is not None
    per_sequence = -(-engine.max_model_len // engine.block_size)
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices]
    if not all(limits):
        return host_blocks(engine, block_bytes)
    budget = smallest(device_budget(engine, min(limits)))
    used = -smallest(-max(device_bytes_in_use(mesh)))
    # allocated after compilation, like the cache
    used += processing_bytes(model, engine, buckets, mesh.size)
    tuning = tuning_bytes(executor)
    transient = max(transient_estimate(model, engine) * 5 // 4, tuning)
    for attempt in range(ATTEMPTS):
        blocks = blocks_that_fit(budget, used, transient, block_bytes)
        executor.compile(max(blocks, per_sequence), buckets.all if engine.warmup else buckets.largest)
        measured = -smallest(-max(executor.transient_bytes(), tuning))
        too_much = attempt == 0 and transient > measured + budget * ENOUGH
        if measured <= transient and not too_much:
            break
        transient = measured if too_much else max(transient, measured)  # after the first, it only rises
    else:
        raise ConfigError(
            f"a step needs {measured / 1e9:.1f} GB besides weights and cache, and more the more blocks there are: set "
            "num_blocks, and please report this with the model's config.json"
        )
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GB) = budget %.2f GB - used %.2f GB - transient %.2f GB",
        blocks, engine.block_size, blocks * block_bytes / 1e9, budget / 1e9, used / 1e9, transient / 1e9,
    )  # fmt: skip
    if blocks < per_sequence:
        raise ConfigError(
            f"gpu_memory_utilization={engine.gpu_memory_utilization} leaves room for {max(blocks, 0)} blocks of "
            f"{engine.block_size} tokens, but one sequence of max_model_len={engine.max_model_len} needs "
            f"{per_sequence}: lower max_model_len or max_num_batched_tokens, raise gpu_memory_utilization, or use a "
            "larger tensor_parallel_size"
        )
    return blocks


def host_blocks(engine: EngineConfig, block_bytes: int) -> int:
    """Blocks where there is no device memory to measure: what max_num_seqs could use, within HOST_POOL_BYTES."""
    assert engine.max_model_len is not None
    per_sequence = -(-engine.max_model_len // engine.block_size)
    return max(min(engine.max_num_seqs * per_sequence, HOST_POOL_BYTES // block_bytes), per_sequence)


def processing_bytes(model: ModelConfig, engine: EngineConfig, buckets: BucketTable, tp: int) -> int:
    """Bytes on each device that processors keep: by row, and each bucket size's logits."""
    if not engine.enable_processors:
        return 0
    logits = sum({bucket.num_seqs for bucket in buckets.all}) * 4 * -(-model.vocab_size // tp)
    return processor_bytes(engine.max_num_seqs, model.vocab_size, tp) + logits


def transient_estimate(model: ModelConfig, engine: EngineConfig) -> int:
    """About what a step needs besides weights and cache, without compiling it (``Executor.transient_bytes`` measures).

    The larger of a full prompt step (residual stream, projections, gate_up and its product of every token) and the
    sampler's float32 logits with their noise, and with processors their keys and weights.
    """
    assert engine.dtype is not None
    itemsize, tp = DTYPE_BYTES[engine.dtype], engine.tensor_parallel_size
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    per_token = 4 * model.hidden_size + (2 * heads * model.head_dim + 3 * model.intermediate_size) // tp
    logits = 4 * (6 if engine.enable_processors else 3) * engine.max_num_seqs * -(-model.vocab_size // tp)
    return max(engine.max_num_batched_tokens * per_token * itemsize, logits)


def device_budget(engine: EngineConfig, bytes_limit: int) -> int:
    """Bytes this engine may use on each device: the asked share of the device, or what jax may allocate if less."""
    asked = int(bytes_limit / backend_memory_fraction() * engine.gpu_memory_utilization)
    if asked > bytes_limit * 1.001:
        logger.warning(
            "gpu_memory_utilization=%s asks for %.2f GB, but jax was started with a limit of %.2f GB, which is used: "
            "create the Engine before other jax work, or set XLA_PYTHON_CLIENT_MEM_FRACTION",
            engine.gpu_memory_utilization, asked / 1e9, bytes_limit / 1e9,
        )  # fmt: skip
    return min(asked, bytes_limit)


def blocks_that_fit(budget: int, used: int, transient: int, block_bytes: int) -> int:
    """Whole blocks in what is left, rounded down to 1/128 of the budget."""
    free = budget - used - transient - int(budget * MARGIN)
    step = max(1, budget // STEPS_OF_BUDGET // block_bytes)
    return max(0, free // block_bytes // step * step)


def device_bytes_in_use(mesh: Mesh) -> list[int]:
    """Bytes allocated now on each of the mesh's devices that are this process's."""
    return [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in mesh.local_devices]


def tuning_bytes(executor: Executor) -> int:
    """Room to compile beside a full pool (``Engine.score``'s first use): XLA times GEMMs on buffers of real sizes."""
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(executor.params)) // executor.mesh.size
    return largest * 3 // 2 + (512 << 20)
