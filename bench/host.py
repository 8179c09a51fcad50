"""What the host spends on a decode step: schedule + fill the plan + commit, without a device.

python -m bench.host              256 running requests, 1024-token prompts, block size 64
python -m bench.host --scheduling-policy running_first --running 10000
"""

import argparse
import statistics
import time

import numpy as np

from bench.common import Row, cpu_name, parser, record
from jaxvllm.core.buckets import BucketTable, default_decode_sizes, default_token_sizes
from jaxvllm.core.plan import PlanLayout, fill_plan
from jaxvllm.core.request import Request
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.sampling_params import SamplingParams

MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 8192
PARTS = ("schedule", "fill", "commit")


def make_scheduler(args: argparse.Namespace) -> Scheduler:
    """`args.running` requests that decode: their prompts are computed."""
    num_blocks = args.running * -(-(args.prompt_len + args.steps + 64) // args.block_size)
    scheduler = Scheduler(
        block_size=args.block_size,
        num_blocks=num_blocks,
        max_num_seqs=args.running,
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, 2 * args.running),
        max_model_len=MAX_MODEL_LEN,
        max_running=args.running,
        scheduling_policy=args.scheduling_policy,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.6, max_tokens=args.steps + 64, ignore_eos=True)
    for n in range(args.running):
        prompt = rng.integers(0, 10000, args.prompt_len, dtype=np.int32)
        scheduler.add(Request.create(str(n), n, prompt, params, model_eos=(), engine_seed=0))
    while scheduler.num_waiting or not scheduler.rows.decoding[scheduler.runnable_rows()].all():
        step = scheduler.schedule()
        assert step is not None
        scheduler.commit(step, np.ones(len(step.requests), np.int32))
    return scheduler


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of each part, and of their sum in a step ("total")."""
    scheduler = make_scheduler(args)
    token_sizes = default_token_sizes(max(MAX_NUM_BATCHED_TOKENS, 2 * args.running))
    table = BucketTable(default_decode_sizes(args.running), token_sizes, args.running)
    num_slots = args.running * MAX_MODEL_LEN
    times = []
    layout = None
    for n in range(args.steps):
        marks = [time.perf_counter()]
        step = scheduler.schedule()
        marks.append(time.perf_counter())
        assert step is not None
        assert step.kind == "decode"
        layout = layout or PlanLayout(table.pick(step), MAX_MODEL_LEN // args.block_size, args.running, num_slots)
        marks.append(time.perf_counter())
        fill_plan(step, scheduler, layout)
        marks.append(time.perf_counter())
        scheduler.commit(step, np.full(len(step.requests), n % 10000, np.int32))
        marks.append(time.perf_counter())
        times.append((marks[1] - marks[0], marks[3] - marks[2], marks[4] - marks[3]))
    columns = [[row[part] for row in times] for part in range(3)]
    medians = {name: statistics.median(column) * 1e6 for name, column in zip(PARTS, columns, strict=True)}
    return medians | {"total": statistics.median(map(sum, times)) * 1e6}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--running", type=int, default=256)
    made.add_argument("--prompt-len", type=int, default=1024)
    made.add_argument("--block-size", type=int, default=64)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--scheduling-policy", default="prefill_first", choices=("prefill_first", "running_first"))
    args = made.parse_args()
    policy = "" if args.scheduling_policy == "prefill_first" else f" {args.scheduling_policy}"
    rows = [Row(f"{args.running} running{policy}, {name}", us, "us") for name, us in measure(args).items()]
    record("host", rows, device=cpu_name(), args=args)


if __name__ == "__main__":
    main()
