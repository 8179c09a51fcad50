"""ModelConfig and EngineConfig: what a model is and how an engine runs it, frozen and free of jax.

Owns: reading a Hugging Face ``config.json`` (every field that changes the result is implemented or refused by name),
validating the engine's options, and the environment (the only file that reads or writes ``os.environ``).
Must not know: jax, arrays, devices.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxvllm.architectures import ARCHITECTURES, SUPPORTED_ARCHITECTURES, architecture_of, refusals, supported
from jaxvllm.rope import ConfigError, RopeConfig

logger = logging.getLogger(__name__)

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
ATTENTION_BACKENDS = ("auto", "xla", "triton", "mosaic", "reference", "triton_interpret", "mosaic_interpret")
MAX_SIZE, MAX_LAYERS = 1 << 30, 1 << 12  # above them a config.json is damaged: refused before anything is built


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense model's shape and numerics. ``head_dim`` is its own number, not hidden_size / heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "Qwen3ForCausalLM"

    def __post_init__(self) -> None:
        problems = []
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            _check_int(problems, name, getattr(self, name), 1)
            limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
            if _is_int(getattr(self, name)) and getattr(self, name) > limit:
                problems.append(f"{name}={getattr(self, name)} must be at most {limit}")
        if not problems and self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not problems and self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even (rotary embedding turns pairs)")
        if not _is_number(self.rms_norm_eps) or self.rms_norm_eps < 0:
            problems.append(f"rms_norm_eps={self.rms_norm_eps!r} must be a number of at least 0")
        if self.dtype not in DTYPE_BYTES:
            problems.append(f"dtype={self.dtype!r} isn't supported; supported are {', '.join(DTYPE_BYTES)}")
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            problems.append(
                f"architecture={self.architecture!r} isn't supported; "
                f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head (1 = MHA, all heads = MQA)."""
        return self.num_attention_heads // self.num_key_value_heads

    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From a Hugging Face config.json (and generation_config.json). What would be ignored is refused by name."""
        refused = refusals(config)
        missing = [n for n in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                               "num_attention_heads") if config.get(n) is None]  # fmt: skip
        if refused or missing:
            parts = [f"not supported: {', '.join(refused)}"] if refused else []
            parts += [f"missing fields: {', '.join(missing)}"] if missing else []
            raise ConfigError(f"config.json can't be run ({'; '.join(parts)}); supported are {supported()}")
        architecture = architecture_of(config)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        try:
            return cls(
                architecture=architecture,
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_hidden_layers=config["num_hidden_layers"],
                num_attention_heads=config["num_attention_heads"],
                num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_dict(config),
                max_position_embeddings=config.get("max_position_embeddings", ARCHITECTURES[architecture][1]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype="bfloat16" if dtype == "float16" else dtype,
                eos_token_ids=_union_of_ids(config.get("eos_token_id"), (generation or {}).get("eos_token_id")),
            )
        except (TypeError, OverflowError, ZeroDivisionError, AttributeError, KeyError) as error:
            raise ConfigError(f"config.json has a field of a wrong type: {error}") from error
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"config.json: {error}") from error

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Reads config.json and, where it lies beside it, generation_config.json."""
        folder = Path(path)
        if not folder.is_dir():
            hub = re.fullmatch(r"[\w.-]+/([\w.-]+)", str(path))
            hint = f"; a Hub name? download it first, e.g. hf download {path} --local-dir {hub[1]}" if hub else ""
            raise ConfigError(f"model={str(path)!r} is not a directory; looked at {folder.absolute()}{hint}")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model={str(path)!r} holds no config.json")
        generation = folder / "generation_config.json"
        return cls.from_dict(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)

    @classmethod
    def qwen3_0_6b(cls) -> ModelConfig:
        """Qwen3-0.6B's published shape."""
        return cls(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                   num_attention_heads=16, num_key_value_heads=8, head_dim=128, rope=RopeConfig(theta=1e6),
                   tie_word_embeddings=True, eos_token_ids=(151643, 151645))  # fmt: skip

    @classmethod
    def qwen3_8b(cls) -> ModelConfig:
        """Qwen3-8B's published shape."""
        return cls(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                   num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope=RopeConfig(theta=1e6),
                   tie_word_embeddings=False, eos_token_ids=(151643, 151645))  # fmt: skip


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """One JSON object; a broken file is a ConfigError that names it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def _union_of_ids(*values: Any) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not _is_int(one) or one < 0:
                raise ConfigError(f"eos_token_id={value!r} must be a token id or a list of them")
            if one not in ids:
                ids.append(one)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs a model. Fields, defaults and meanings are those of ``Engine``'s keywords.

    The fields from ``policy`` to ``share_prefixes`` are checked where they are used (``core.Rules``).
    A resolved value (an "auto" or None that became a number) goes into a new object (``dataclasses.replace``).
    """

    tensor_parallel_size: int = 1
    block_size: int = 64
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduling_policy: str = "prefill_first"
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    reserve_full_prompt: bool = True
    enable_chunked_prefill: bool = True
    share_prefixes: bool = True
    enable_prefix_caching: bool = True
    dtype: str | None = None
    seed: int = 0
    attention_backend: str = "auto"
    batch_invariant: bool = False
    disable_custom_all_reduce: bool = False
    async_steps: int = 1
    decode_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    enable_processors: bool = True
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    warmup: bool = True

    def __post_init__(self) -> None:
        problems = []
        for name in self.__dataclass_fields__:
            if hasattr(value := getattr(self, name), "__index__") and not isinstance(value, int):
                object.__setattr__(self, name, operator.index(value))  # numpy's whole numbers
        for name in ("tensor_parallel_size", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_int(problems, name, getattr(self, name), 1)
        for name, low in (("num_blocks", 1), ("max_model_len", 2)):  # 2: a prompt token and an output token
            if getattr(self, name) is not None:
                _check_int(problems, name, getattr(self, name), low)
        flags = "enable_prefix_caching", "batch_invariant", "disable_custom_all_reduce", "enable_processors", "warmup"
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name}={getattr(self, name)!r} must be True or False")
        _check_int(problems, "async_steps", self.async_steps, 0)
        _check_int(problems, "seed", self.seed, 0)
        _check_int(problems, "max_logprobs", self.max_logprobs, 0)
        for name, choices in (("logprobs_mode", LOGPROBS_MODES), ("generation_config", ("auto", "none")),
                              ("attention_backend", ATTENTION_BACKENDS)):  # fmt: skip
            if getattr(self, name) not in choices:
                problems.append(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if not _is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            problems.append(f"gpu_memory_utilization={self.gpu_memory_utilization!r} must be above 0 and at most 1")
        if self.dtype not in (None, *DTYPE_BYTES):
            problems.append(f"dtype={self.dtype!r} must be one of {', '.join(DTYPE_BYTES)} or None (the checkpoint's)")
        for name in ("decode_buckets", "token_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or any(not _is_int(s) or s < 1 for s in sizes)):
                problems.append(f"{name}={sizes!r} must be whole numbers of at least 1, or None for the default table")
        if not problems and self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
                f"{self.max_num_seqs}: raise the first or lower the second"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """Fills what depends on the model: dtype and max_model_len (at most the model's positions)."""
        limit = model.max_position_embeddings
        length = limit if self.max_model_len is None else self.max_model_len
        if length > limit:
            raise ConfigError(
                f"max_model_len={length} is above the model's max_position_embeddings={limit}: lower it, or use a "
                "checkpoint whose rope_parameters extend its positions"
            )
        if self.num_blocks is not None:  # a sequence longer than the pool can't exist
            room = self.num_blocks * self.block_size + 1
            if room < length:
                logger.warning("num_blocks=%d of %d tokens: a request has at most %d tokens, not max_model_len=%d",
                               self.num_blocks, self.block_size, room, length)  # fmt: skip
            length = min(length, room)
        return replace(self, max_model_len=length, dtype=self.dtype or model.dtype)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_int(problems: list[str], name: str, value: object, low: int) -> None:
    if not _is_int(value) or value < low:  # type: ignore[operator]
        problems.append(f"{name}={value!r} must be a whole number of at least {low}")


def set_backend_memory_fraction(fraction: float) -> None:
    """Asks jax's GPU allocator for this share of the device, before the backend starts; a user's own setting stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{fraction:.3f}")


def ask_without_preallocation(fraction: float) -> None:
    """As ``set_backend_memory_fraction``, for a process that only asks how much memory there is."""
    set_backend_memory_fraction(fraction)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def backend_memory_fraction() -> float:
    """The share of a GPU that jax's allocator was told to take (jax's own default is 0.75)."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))


def compilation_cache_dir() -> str | None:
    """Where compiled steps are kept between runs: JAXVLLM_CACHE_DIR, else ~/.cache/jaxvllm/compiled; "": nowhere."""
    asked = os.environ.get("JAXVLLM_CACHE_DIR")
    if asked is not None:
        return asked or None
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # jax reads it by itself
        return os.environ["JAX_COMPILATION_CACHE_DIR"] or None
    return str(Path.home() / ".cache" / "jaxvllm" / "compiled")
