"""Output tokens per second on the headline workload, and the time from the constructor to a first token.

python -m bench.throughput --config qwen3-0.6b
python -m bench.throughput --config qwen3-8b --tensor-parallel-size 2

256 prompts of 100 to 1024 random ids, 100 to 1024 new tokens each, temperature 0.6, ignore_eos: 142,827
tokens in, 133,966 out, all given at once to a warm engine with an empty prefix cache. Weights are random.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from bench.common import Row, accelerator_name, commit, record, versions
from bench.models import model_config, workload_floor_s
from bench.workload import Workload, headline

STARTED = time.perf_counter()
from bench.engines import TimedEngine, engine_parser, label, make_engine, warm_up  # noqa: E402  (its imports are timed)
from jaxvllm import SamplingParams  # noqa: E402
from jaxvllm.config import compilation_cache_dir  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - STARTED


def run_once(engine: TimedEngine, workload: Workload) -> float:
    """Seconds of the whole workload. Raises RuntimeError if a request got another number of tokens."""
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    engine.reset_prefix_cache()
    started = time.perf_counter()
    outputs = engine.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    got = [len(output.token_ids) for output in outputs]
    if got != workload.output_lens:
        raise RuntimeError(f"asked for {sum(workload.output_lens)} tokens, got {sum(got)}")
    return seconds


def main() -> None:
    made = engine_parser(__doc__)
    made.add_argument("--num-prompts", type=int, default=256, help="fewer: not the headline any more")
    made.add_argument("--max-len", type=int, default=1024, help="longest prompt and output")
    made.add_argument("--repeats", type=int, default=3, help="the median counts")
    args = made.parse_args()
    config = model_config(args.config)
    max_id = min(10000, config.vocab_size - 1)
    workload = headline(args.num_prompts, low=min(100, args.max_len), high=args.max_len, max_id=max_id)

    cache = compilation_cache_dir()
    warm = cache is not None and Path(cache).is_dir() and any(Path(cache).iterdir())
    started = time.perf_counter()
    engine = make_engine(args)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    start_seconds = time.perf_counter() - started
    with engine:
        warm_up(engine)
        seconds = [run_once(engine, workload) for _ in range(args.repeats)]
        report(args, engine, workload, seconds, start_seconds, warm)


def report(
    args: argparse.Namespace,
    engine: TimedEngine,
    workload: Workload,
    seconds: list[float],
    start_seconds: float,
    warm: bool,
) -> None:
    """Appends the rows and prints one JSON line with everything about the run. warm: compiled programs were kept."""
    lens = [len(prompt) for prompt in workload.prompts]
    floor_s = workload_floor_s(engine.model_config, lens, workload.output_lens)
    tokens = workload.num_output_tokens
    rate = tokens / statistics.median(seconds)
    name = "headline" if args.num_prompts == 256 and args.max_len == 1024 else f"{args.num_prompts} prompts"
    device = accelerator_name(args.tensor_parallel_size)
    # floors are an H200's, for one device's worth of bandwidth each
    floor = tokens / floor_s * args.tensor_parallel_size if "H200" in device else None
    rows = [
        Row(f"{label(args)} {name}", rate, "output tok/s", floor),
        Row(f"{label(args)} start to first request{', warm cache' if warm else ''}", start_seconds, "s"),
        Row(f"{label(args)} imports", IMPORT_SECONDS, "s"),
    ]
    record("throughput", rows, device=device, args=args)
    facts = {
        "config": label(args),
        "tokens_in": workload.num_input_tokens,
        "tokens_out": tokens,
        "seconds": [round(s, 3) for s in seconds],
        "output_tokens_per_s": round(rate, 1),
        "start_seconds": round(start_seconds, 2),
        "import_seconds": round(IMPORT_SECONDS, 2),
        "engine": engine.stats(),
        "options": engine.config.to_dict(),
        "versions": versions(),
        "device": device,
        "commit": args.commit or commit(),
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
