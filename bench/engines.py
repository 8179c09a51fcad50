"""Engines with random weights for benchmarks, their command-line options, and the times of their steps."""

import argparse
import time
from dataclasses import replace
from typing import Any

from bench.common import parser
from bench.models import model_config
from bench.workload import random_prompts
from jaxvllm import Engine, SamplingParams, startup
from jaxvllm.core.policy import POLICIES
from jaxvllm.processing import Processing


def engine_parser(doc: str | None, config: str | None = None) -> argparse.ArgumentParser:
    """Options of every benchmark that runs an engine; `config`: the default of --config."""
    made = parser(doc)
    made.add_argument(
        "--config", required=config is None, default=config, help="qwen3-0.6b, qwen3-8b, or tiny (to see that it runs)"
    )
    made.add_argument("--tensor-parallel-size", "--tp", type=int, default=1)
    made.add_argument("--max-model-len", type=int, default=4096)
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--max-num-batched-tokens", type=int, default=8192)
    made.add_argument("--block-size", type=int, default=64)
    made.add_argument("--num-blocks", type=int, help="KV cache blocks (default: what fits)")
    made.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    made.add_argument("--attention-backend", default="auto")
    made.add_argument("--batch-invariant", action="store_true", help="the same bits in any batch")
    made.add_argument("--async-steps", type=int, default=1)
    made.add_argument("--scheduling-policy", default="prefill_first", help="or running_first")
    made.add_argument(
        "--no-processors", dest="enable_processors", action="store_false",
        help="compile the plain variant of each step only",
    )  # fmt: skip
    made.add_argument("--decode-buckets", type=sizes, help="like 1,8,64,256 (default: the engine's table)")
    made.add_argument("--token-buckets", type=sizes, help="like 1024,8192")
    return made


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def part_of(text: str) -> tuple[str, int]:
    """ "running_first:512" -> policy and token budget, for ``reschedule``. Raises ArgumentTypeError."""
    policy, _, budget = text.partition(":")
    if policy not in POLICIES or not budget.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be like running_first:512")
    return policy, int(budget)


ENGINE_OPTIONS = (
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "gpu_memory_utilization",
    "attention_backend",
    "batch_invariant",
    "async_steps",
    "scheduling_policy",
    "decode_buckets",
    "token_buckets",
    "enable_processors",
)


class TimedEngine(Engine):
    """An engine that notes when each turn of its loop ended (seconds of time.perf_counter), in `turns`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.turns: list[float] = []
        super().__init__(*args, **options)

    def _advance(self) -> Any:
        finished = super()._advance()
        self.turns.append(time.perf_counter())
        return finished


def make_engine(args: argparse.Namespace) -> TimedEngine:
    """The engine that the options describe, with random weights made on the device."""
    return TimedEngine(model_config(args.config), **{name: getattr(args, name) for name in ENGINE_OPTIONS})


def reschedule(engine: TimedEngine, policy: str, budget: int, *, share_prefixes: bool = True) -> None:
    """Gives an idle engine another policy and budget: a new scheduler with an empty pool. Nothing is compiled: weights,
    the cache's memory and the steps stay. So it is the engine that was made so, if `budget` is one of the token
    buckets: an engine of a smaller budget has the same buckets up to there, and picks the same ones.
    """
    if engine.has_unfinished_requests():
        raise RuntimeError("the engine has unfinished requests")
    while engine._in_flight:  # a last step, for requests that have ended
        engine.step()
    if budget not in [bucket.num_tokens for bucket in engine.buckets.all if bucket.kind == "ragged"]:
        raise ValueError(f"budget={budget} isn't one of the engine's token buckets")
    config = replace(
        engine.config, scheduling_policy=policy, max_num_batched_tokens=budget, share_prefixes=share_prefixes
    )
    engine._scheduler = startup.make_scheduler(config, startup.scheduling_rules(config))
    engine._processing = Processing(engine._executor, config.max_num_seqs)
    engine.config = config


def warm_up(engine: TimedEngine) -> None:
    """Every allocation and code path once, with ids that no workload has as its prompts."""
    prompts = random_prompts(64, 32, max_id=min(10000, engine.model_config.vocab_size - 1), seed=1)
    engine.generate(prompts, SamplingParams(temperature=0.6, max_tokens=8, ignore_eos=True), use_tqdm=False)


def label(args: argparse.Namespace) -> str:
    """How rows name the configuration: "qwen3-8b tp2 running_first 512"; defaults aren't mentioned."""
    parallel = args.tensor_parallel_size
    policy = "" if args.scheduling_policy == "prefill_first" else f" {args.scheduling_policy}"
    if policy and args.max_num_batched_tokens != 8192:
        policy += f" {args.max_num_batched_tokens}"
    invariant = " batch_invariant" if args.batch_invariant else ""
    return args.config + (f" tp{parallel}" if parallel > 1 else "") + policy + invariant
