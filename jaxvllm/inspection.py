"""``jaxvllm inspect``: what a model is and what of it fits here, before anyone waits for a load.

Reads config.json and the headers of the weights; starts jax's backend (without taking its memory) to ask how much there
is. What a step needs besides is estimated here; the engine measures it. Same room as the engine: imports any other.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxvllm.config import DTYPE_BYTES, EngineConfig, ModelConfig, ask_without_preallocation
from jaxvllm.models.registry import param_table


def inspect_model(path: str, engine: EngineConfig, *, device_bytes: int | None = None) -> dict[str, Any]:
    """config; tokenizer; parameters: [count, bytes] by kind; kv_bytes_per_token; checkpoint; fits.

    engine: as the model would be run. device_bytes: memory of another device than is here.
    Raises ConfigError naming what isn't supported, also a tensor_parallel_size that doesn't divide.
    """
    from jaxvllm.tokenizer import Tokenizer

    config = ModelConfig.from_dir(path)
    engine = engine.resolve(config)
    itemsize = DTYPE_BYTES[config.dtype]
    counts: dict[str, int] = {}
    for info in param_table(config).values():
        kind = info.path.rpartition(".")[2]
        counts[kind] = counts.get(kind, 0) + info.size
    counts["total"] = sum(counts.values())
    return {
        "config": asdict(config),
        "tokenizer": Tokenizer.from_dir(path) is not None,
        "parameters": {kind: [count, count * itemsize] for kind, count in counts.items()},
        "kv_bytes_per_token": config.kv_bytes_per_token(),
        "checkpoint": inspect_checkpoint(path, config),
        "fits": what_fits(config, engine, device_bytes),
    }


def inspect_checkpoint(path: str, config: ModelConfig) -> dict[str, Any]:
    """format, bytes on the disk, and problems: why it wouldn't load, as loading would list them."""
    from jaxvllm.convert import CheckpointError, open_checkpoint

    try:
        with open_checkpoint(path) as reader:
            problems = reader.problems(param_table(config))
            form = reader.format
    except CheckpointError as error:
        problems, form = list(error.problems), None
    files = [f for f in Path(path).rglob("*") if f.is_file() and (f.suffix == ".safetensors" or "params" in f.parts)]
    return {"format": form, "bytes": sum(f.stat().st_size for f in files), "problems": problems}


def what_fits(config: ModelConfig, engine: EngineConfig, device_bytes: int | None) -> dict[str, Any]:
    """Bytes on each device, and the KV blocks that they leave room for: blocks, tokens, sequences of max_model_len."""
    from jaxvllm.models.params import per_device_size
    from jaxvllm.runtime.memory import (
        blocks_that_fit,
        device_budget,
        host_blocks,
        processing_bytes,
        transient_estimate,
    )
    from jaxvllm.runtime.state import kv_block_bytes
    from jaxvllm.startup import bucket_table

    tp, size = engine.tensor_parallel_size, engine.block_size
    assert engine.dtype is not None and engine.max_model_len is not None
    weights = per_device_size(param_table(config, tp=tp), tp) * DTYPE_BYTES[engine.dtype]
    block, per_sequence = kv_block_bytes(config, engine, tp), -(-engine.max_model_len // size)
    transient = transient_estimate(config, engine)
    processors = processing_bytes(config, engine, bucket_table(engine), tp)
    if device_bytes is not None:
        device, budget = f"{device_bytes / 1e9:g} GB (asked)", int(device_bytes * engine.gpu_memory_utilization)
    else:
        ask_without_preallocation(engine.gpu_memory_utilization)
        import jax

        found = jax.local_devices()[0]
        device, stats = found.device_kind, found.memory_stats()
        budget = device_budget(engine, stats["bytes_limit"]) if stats and "bytes_limit" in stats else None
    blocks = (
        host_blocks(engine, block)
        if budget is None
        else blocks_that_fit(budget, weights + processors, transient, block)
    )
    return {
        "device": device,
        "tensor_parallel_size": tp,
        "budget_bytes": budget,
        "weight_bytes": weights,
        "processor_bytes": processors,
        "step_bytes": transient,
        "block_bytes": block,
        "block_size": size,
        "max_model_len": engine.max_model_len,
        "blocks": blocks,
        "tokens": blocks * size,
        "sequences": blocks // per_sequence,
    }


def as_text(facts: dict[str, Any]) -> str:
    """What the command prints."""
    lines = [f"{name:<28}{value}" for name, value in facts["config"].items() if name != "rope"]
    rope = facts["config"]["rope"]
    kept = ("theta",) if rope["rope_type"] == "default" else ("theta", "factor", "original_max_position_embeddings")
    lines.append(f"{'rope':<28}{rope['rope_type']}: " + ", ".join(f"{name} {rope[name]}" for name in kept))
    lines.append(f"{'tokenizer':<28}{'yes' if facts['tokenizer'] else 'no'}\n")
    for name, (count, size) in facts["parameters"].items():
        lines.append(f"{name:<28}{count:>16,} parameters {size / 2**20:>12,.1f} MiB")
    lines.append(f"{'KV cache':<28}{facts['kv_bytes_per_token']:>16,} bytes a token\n")
    checkpoint = facts["checkpoint"]
    kinds = {"hf": "Hugging Face safetensors", "jaxvllm": "ours (jaxvllm convert)", None: "can't be loaded"}
    lines.append(f"{'weights on the disk':<28}{kinds[checkpoint['format']]}, {_size(checkpoint['bytes'])}")
    lines += [f"{'':<28}- {problem}" for problem in checkpoint["problems"]]
    return "\n".join([*lines, *_fits_text(facts["fits"])])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.2f} MiB"


def _fits_text(fits: dict[str, Any]) -> list[str]:
    devices = f"{fits['tensor_parallel_size']} x " if fits["tensor_parallel_size"] > 1 else ""
    budget = fits["budget_bytes"]
    room = "a pool of at most 1 GiB on the host" if budget is None else f"{_size(budget)} for the engine"
    lines = [
        f"{'device':<28}{devices}{fits['device']}: {room}",
        f"{'on each device':<28}weights {_size(fits['weight_bytes'])}, processors {_size(fits['processor_bytes'])}, "
        f"a step about {_size(fits['step_bytes'])}, a block {_size(fits['block_bytes'])}",
    ]
    if fits["blocks"] <= 0:
        return [*lines, f"{'fits':<28}no: use a larger --tensor-parallel-size or a smaller model"]
    short = "" if fits["sequences"] else ": lower --max-model-len, or use a larger --tensor-parallel-size"
    return [
        *lines,
        f"{'fits':<28}{fits['blocks']:,} blocks of {fits['block_size']} = {fits['tokens']:,} tokens = "
        f"{fits['sequences']:,} sequences of max_model_len {fits['max_model_len']:,}{short}",
    ]
