"""The host room alone, over a device that is only a cost model: policies compared over very many requests.

python -m bench.simulate                                      the mix below at 70 % of its capacity, both policies
python -m bench.simulate --requests 1000000 --prompt-len 64 --output-len 16 --long-every 0
python -m bench.simulate --arrivals bursty --token-budgets 512,1024,2048

The mix: Poisson arrivals of --prompt-len / --output-len tokens, and one --long-len prompt every --long-every seconds.
Capacity is the mix's own closed-loop rate (everything there at once), simulated first, under prefill_first. A step:

    base + max(weight bytes / read rate, matrix operations / matrix rate) + KV bytes / read rate + attention operations

divided by --efficiency: the model of bench.models, whose rates were measured on an H200. Times are simulated; "host" is
real time of this machine's processor. The loop runs one step ahead, like the engine's.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.arrivals import add_mix_options, all_at_once, arrivals, mix_of
from bench.common import Row, cpu_name, parser, record
from bench.gaps import Gaps
from bench.models import BF16_OPERATIONS_PER_S, READ_BYTES_PER_S, layer_weights, model_config
from jaxvllm.config import DTYPE_BYTES
from jaxvllm.core import Request, Rules, ScheduledStep, Scheduler
from jaxvllm.sampling_params import SamplingParams


class CostModel:
    """Seconds of a step."""

    def __init__(self, name: str, efficiency: float, base_s: float) -> None:
        config = model_config(name)
        self.weights = layer_weights(config) + config.vocab_size * config.hidden_size
        self.weight_s = self.weights * DTYPE_BYTES[config.dtype] / READ_BYTES_PER_S
        self.kv_s = config.kv_bytes_per_token() / READ_BYTES_PER_S
        pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        self.pair_s = pair / BF16_OPERATIONS_PER_S
        self.base_s, self.efficiency = base_s, efficiency

    def seconds(self, step: ScheduledStep) -> float:
        """Chunks read the cache once; each of their tokens meets all tokens before it."""
        counts, ends = step.num_tokens.astype(np.float64), (step.starts + step.num_tokens).astype(np.float64)
        matrices = max(self.weight_s, 2 * self.weights * counts.sum() / BF16_OPERATIONS_PER_S)
        pairs = (counts * (ends - counts / 2))[counts > 1].sum()
        return self.base_s + (matrices + ends.sum() * self.kv_s + pairs * self.pair_s) / self.efficiency


@dataclass(slots=True)
class Result:
    """What one run came to."""

    seconds: float
    output_tokens: int
    first_token_s: np.ndarray
    gaps: Gaps
    host_s: float
    scheduler: Scheduler


def run(args: argparse.Namespace, policy: str, budget: int, coming: Iterator[tuple[float, int]]) -> Result:
    """Drive a scheduler until every request has ended."""
    now = 0.0
    rules = Rules(share_prefixes=args.share_prefixes)
    scheduler = Scheduler(
        block_size=args.block_size, num_blocks=args.num_blocks, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget, max_model_len=mix_of(args).longest, max_running=args.max_num_seqs,
        scheduling_policy=policy, rules=rules, clock=lambda: now,
    )  # fmt: skip
    model = CostModel(args.config, args.efficiency, args.base_us * 1e-6)
    rng = np.random.default_rng(args.seed + 1)
    stems = rng.integers(0, 10000, (8, args.shared_prefix), dtype=np.int32)
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True)
    last_token = np.zeros(args.max_num_seqs)
    gaps, host, number = Gaps(), 0.0, 0
    first_token_s: list[float] = []
    in_flight: deque[tuple[ScheduledStep, float]] = deque()
    device_free = 0.0
    upcoming = next(coming, None)
    while upcoming is not None or scheduler.has_unfinished() or in_flight:
        if upcoming is not None and not scheduler.has_unfinished() and not in_flight:
            now = max(now, upcoming[0])
        while upcoming is not None and upcoming[0] <= now:
            prompt = rng.integers(0, 10000, upcoming[1], dtype=np.int32)
            prompt[: args.shared_prefix] = stems[number % len(stems)][: upcoming[1]]
            request = Request.create(str(number), number, prompt, params, model_eos=(), engine_seed=0)
            request.arrival_time = upcoming[0]
            scheduler.add(request)
            number += 1
            upcoming = next(coming, None)
        started = time.perf_counter()
        step = scheduler.schedule()
        host += time.perf_counter() - started
        if step is not None:
            device_free = max(device_free, now) + model.seconds(step)
            in_flight.append((step, device_free))
        while len(in_flight) > (1 if step is not None else 0):
            done, now = in_flight.popleft()
            rows = done.rows[done.samples]
            first = np.zeros(len(done.rows), bool)
            first[done.first_samples] = True
            again = done.rows[done.samples & ~first]
            took = now - last_token[again]
            last_token[rows] = now
            gaps.add(took)
            started = time.perf_counter()
            finished = scheduler.commit(done, np.ones(len(done.requests), np.int32))
            host += time.perf_counter() - started
            first_token_s += [request.first_token_time - request.arrival_time for request in finished]
    return Result(now, scheduler.counters.output_tokens, np.array(first_token_s), gaps, host, scheduler)


def rows_of(result: Result, case: str) -> list[Row]:
    """The figures of a run."""
    counters = result.scheduler.counters
    first = np.percentile(result.first_token_s, (50, 99)) * 1e3
    return [
        Row(f"{case}, output rate", result.output_tokens / result.seconds, "tok/s"),
        *(Row(f"{case}, first token p{p}", value, "ms") for p, value in zip((50, 99), first, strict=True)),
        *(Row(f"{case}, between tokens p{p:g}", result.gaps.percentile_s(p) * 1e3, "ms") for p in (50, 99, 99.9)),
        Row(f"{case}, longest gap", result.gaps.longest_s * 1e3, "ms"),
        Row(f"{case}, preemptions", counters.preemptions, "count"),
        Row(f"{case}, prefix hits", 100 * counters.prefix_hit_tokens / max(1, counters.prefix_queried_tokens), "%"),
        Row(f"{case}, host a step", 1e6 * result.host_s / counters.steps, "us"),
        Row(f"{case}, steps", counters.steps, "count"),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--config", default="qwen3-8b")
    made.add_argument("--requests", type=int, default=5000)
    add_mix_options(made)
    made.add_argument("--shared-prefix", type=int, default=0, help="tokens that every eighth request shares")
    made.add_argument("--share-prefixes", action="store_true", help="requests wait for a prefix being computed")
    made.add_argument("--arrivals", choices=("poisson", "bursty"), default="poisson")
    made.add_argument("--burst", type=int, default=16, help="requests that come together under bursty")
    made.add_argument("--policies", default="prefill_first,running_first")
    made.add_argument("--prefill-first-budget", type=int, default=8192)
    made.add_argument("--token-budgets", default="1024", help="of running_first, like 512,1024")
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--block-size", type=int, default=64)
    made.add_argument("--num-blocks", type=int, default=11000)
    made.add_argument("--efficiency", type=float, default=0.85, help="of the hardware's measured limits")
    made.add_argument("--base-us", type=float, default=300.0, help="of a step, whatever is in it")
    args = made.parse_args()
    mix = mix_of(args)
    rows: list[Row] = []
    rate = args.rate
    if rate is None:
        probe = argparse.Namespace(**{**vars(args), "requests": min(args.requests, 2000)})
        num_long = 0.0
        for _ in range(3 if args.long_every else 1):  # how many long prompts come in that time depends on the time
            coming = all_at_once(mix, num_short=probe.requests, num_long=num_long)
            result = run(probe, "prefill_first", args.prefill_first_budget, coming)
            num_long = result.seconds / args.long_every if args.long_every else 0.0
        rate = args.load * probe.requests / result.seconds
        rows.append(Row("capacity of the mix", probe.requests / result.seconds, "requests/s"))
    for policy in args.policies.split(","):
        budgets = args.token_budgets if policy == "running_first" else str(args.prefill_first_budget)
        for budget in map(int, budgets.split(",")):
            coming = arrivals(mix, rate, num_short=args.requests, seed=args.seed)
            result = run(args, policy, budget, coming)
            rows += rows_of(result, f"{policy} budget {budget}")
    record("simulate", rows, device=cpu_name(), args=args)


if __name__ == "__main__":
    main()
