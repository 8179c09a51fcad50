"""Times between tokens under open-loop arrivals: both scheduling policies, several token budgets, one engine.

python -m bench.latency --config qwen3-8b --no-processors               all parts, each recorded when it is done
python -m bench.latency --config qwen3-8b --no-processors --only running_first:512,running_first:1024
python -m bench.latency --picture                                       draws the recorded parts

The mix: Poisson arrivals of --prompt-len / --output-len tokens at --load of the capacity for --seconds, and one
--long-len prompt every --long-every seconds; the same times and prompts for every part. The parts (--only):

    capacity          the mix in a closed loop, prefill_first: --capacity-requests that wait already and the long
                      prompts by the clock; short requests a second. Without it: --rate, or the last recorded capacity
    POLICY:BUDGET     one open-loop run (default: --sweep)
    shared_prefixes   share_prefixes on and off: see bench.shared_prefixes

All of them run in one engine, whose steps are compiled once: bench.engines.reschedule gives it another policy and
budget. A token counts when the client has it, that is, when Engine.step() has returned it; the times between tokens are
of the short requests if nothing else is said. A first token's time counts from the arrival. See bench.serving.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench import shared_prefixes
from bench.arrivals import Mix, add_mix_options, arrivals, mix_of
from bench.common import RESULTS, Row, accelerator_name, commit, record
from bench.engines import TimedEngine, engine_parser, label, make_engine, part_of, reschedule, warm_up
from bench.gaps import Gaps
from bench.latency_picture import draw
from bench.serving import Run, Source, drive
from jaxvllm.core.buckets import default_token_sizes

SWEEP = "prefill_first:8192,running_first:8192,running_first:2048,running_first:1024,running_first:512"
CAPACITY = "capacity of the mix"


def parts_of(text: str) -> list[str]:
    """Names of parts, checked. Raises ArgumentTypeError."""
    names = text.split(",")
    for name in names:
        if name not in ("capacity", "shared_prefixes"):
            part_of(name)
    return names


def prompts_of(mix: Mix, timed: list[tuple[float, int]], args: argparse.Namespace, max_id: int
               ) -> list[tuple[float, np.ndarray]]:  # fmt: skip
    """Random ids for each of the arrivals."""
    rng = np.random.default_rng(args.seed + 1)
    return [(time_s, rng.integers(0, max_id, length, dtype=np.int32)) for time_s, length in timed]


def measure_capacity(engine: TimedEngine, args: argparse.Namespace, mix: Mix, max_id: int) -> list[Row]:
    """A closed loop: as many wait as the next steps could take, so it is as if everything were there; the long prompts
    come by the clock, so their share is the mix's own without knowing the rate."""
    budget = args.max_num_batched_tokens
    reschedule(engine, "prefill_first", budget)
    times = np.arange(0, args.capacity_limit, mix.long_every) if mix.long_every else []
    timed = prompts_of(mix, [(float(time_s), mix.long_len) for time_s in times], args, max_id)
    short = prompts_of(mix, [(0.0, mix.prompt_len)] * args.capacity_requests, args, max_id)
    source = Source(timed, [prompt for _, prompt in short], ahead=2 * budget // mix.prompt_len + 1)
    run = drive(engine, source, mix.output_len, args.capacity_limit)
    ends = [one.token_s[-1] for one in run.served if one.finished and one.prompt_len == mix.prompt_len]
    if not ends:
        raise SystemExit("no request was done: raise --capacity-limit")
    return [
        Row(f"{label(args)} {CAPACITY}", len(ends) / max(ends), "requests/s"),
        Row(f"{label(args)} {CAPACITY}, output rate in the closed loop", run.rate(0, run.seconds), "tok/s"),
    ]


def recorded_capacity(args: argparse.Namespace, device: str) -> float:
    """The last one in OUT/latency.jsonl. SystemExit if there is none."""
    path: Path = args.out / "latency.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    wanted = f"{label(args)} {CAPACITY}", device
    found = [row["value"] for row in map(json.loads, lines) if (row["case"], row["device"]) == wanted]
    if not found:
        raise SystemExit(f"{path} has no capacity of {device}: measure it (--only capacity,...) or give --rate")
    return found[-1]


def open_loop(
    engine: TimedEngine, args: argparse.Namespace, mix: Mix, part: tuple[str, int], rate: float, max_id: int
) -> Run:
    """Arrivals for --seconds, then until everybody is done."""
    reschedule(engine, *part)
    coming = arrivals(mix, rate, num_short=10**9, seed=args.seed)
    timed = list(itertools.takewhile(lambda arrival: arrival[0] < args.seconds, coming))
    return drive(engine, Source(prompts_of(mix, timed, args, max_id)), mix.output_len, args.seconds + args.drain)


def rows_of(run: Run, engine: TimedEngine, mix: Mix, case: str, seconds: float) -> list[Row]:
    """The figures of an open-loop run with `seconds` of arrivals. Its output rate is that of the last three quarters of
    this time: filling and draining, which the policies do differently, are left out."""
    short = [one.first_token_s for one in run.served if one.token_s and one.prompt_len == mix.prompt_len]
    long = [one.first_token_s for one in run.served if one.token_s and one.prompt_len != mix.prompt_len]
    stats = engine.stats()

    def percentiles(
        name: str, values: np.ndarray | list[float], which: tuple[float, ...], of: str = ""
    ) -> Iterator[Row]:
        if len(values):
            for percent, value in zip(which, np.percentile(values, which), strict=True):
                yield Row(f"{case}, {name} p{percent:g}{of}", float(value) * 1e3, "ms")

    gaps, of_all = run.gaps_s(mix.prompt_len), run.gaps_s()
    return [
        Row(f"{case}, output rate", run.rate(seconds / 4, seconds), "tok/s"),
        Row(f"{case}, output rate from start to end", run.rate(0, run.seconds), "tok/s"),
        *percentiles("first token", short, (50, 99)),
        *percentiles("first token", long, (50, 99), " of long prompts"),
        *percentiles("between tokens", gaps, (50, 99, 99.9)),
        Row(f"{case}, longest gap", float(gaps.max(initial=0)) * 1e3, "ms"),
        *percentiles("between tokens", of_all, (50, 99, 99.9), " of all requests"),
        Row(f"{case}, longest gap of all requests", float(of_all.max(initial=0)) * 1e3, "ms"),
        Row(f"{case}, completed", sum(one.finished for one in run.served), "requests"),
        Row(f"{case}, not completed", sum(not one.finished for one in run.served), "requests"),
        Row(f"{case}, preemptions", stats["preemptions"], "count"),
        Row(f"{case}, compiles after warm-up", stats["compiles_after_warmup"], "count"),
        Row(f"{case}, longest garbage collection", run.longest_collection_s * 1e3, "ms"),
    ]


def record_gaps(gaps_s: np.ndarray, case: str, device: str, args: argparse.Namespace) -> None:
    """Appends the histogram (bench.gaps; {bin: count}) to OUT/latency_gaps.jsonl, for the picture."""
    gaps = Gaps()
    gaps.add(gaps_s)
    counts = {str(n): int(gaps.counts[n]) for n in gaps.counts.nonzero()[0]}
    line = {"case": case, "device": device, "commit": args.commit or commit(), "counts": counts}
    with (args.out / "latency_gaps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def measure(engine: TimedEngine, args: argparse.Namespace, names: list[str]) -> None:
    """Runs the parts in order; SystemExit, and no row of the part, if a step was compiled in it."""
    mix, device, rate = mix_of(args), accelerator_name(args.tensor_parallel_size), args.rate
    max_id = min(10000, engine.model_config.vocab_size - 1)
    warm_up(engine)

    def note(rows: list[Row]) -> None:
        if compiles := engine.stats()["compiles_after_warmup"]:
            raise SystemExit(f"{compiles} compilations after warm-up: these times are worth nothing")
        record("latency", rows, device=device, args=args)

    for name in names:
        if name == "capacity":
            rows = measure_capacity(engine, args, mix, max_id)
            note(rows)
            rate = rate or args.load * rows[0].value
        elif name == "shared_prefixes":
            for rows in shared_prefixes.measure(engine, args, max_id):
                note(rows)
        else:
            rate = rate or args.load * recorded_capacity(args, device)
            run = open_loop(engine, args, mix, part_of(name), rate, max_id)
            case = f"{label(args)} {name.replace(':', ' ')}"
            note([Row(f"{case}, arrivals", rate, "requests/s"), *rows_of(run, engine, mix, case, args.seconds)])
            record_gaps(run.gaps_s(mix.prompt_len), case, device, args)


def main() -> None:
    made = engine_parser(__doc__, "qwen3-8b")
    add_mix_options(made)
    made.add_argument("--only", type=parts_of, help="parts, in order (default: capacity, --sweep, shared_prefixes)")
    made.add_argument("--sweep", type=parts_of, default=parts_of(SWEEP), help=f"default: {SWEEP}")
    made.add_argument("--seconds", type=float, default=45.0, help="of arrivals, in each open-loop run")
    made.add_argument("--drain", type=float, default=30.0, help="seconds after the last arrival, at most")
    made.add_argument("--capacity-requests", type=int, default=760, help="just below a multiple of --max-num-seqs")
    made.add_argument("--capacity-limit", type=float, default=75.0, help="seconds of the closed loop, at most")
    shared_prefixes.add_options(made)
    made.add_argument("--picture", type=Path, nargs="?", const=RESULTS / "latency.png", help="draw, measure nothing")
    made.set_defaults(max_model_len=20480)  # the mix needs 16640
    args = made.parse_args()
    if args.picture:
        draw(args.out, args.picture)
        return
    names = args.only or ["capacity", *args.sweep, "shared_prefixes"]
    budgets = {budget for _, budget in [*(part_of(name) for name in names if ":" in name), *args.shared_parts]}
    # one table for every call, whatever its parts, so that the compilation cache knows its steps
    args.max_num_batched_tokens = max({args.max_num_batched_tokens} | budgets)
    sizes = args.token_buckets or default_token_sizes(args.max_num_batched_tokens)
    args.token_buckets = sorted({*sizes, *budgets})
    with make_engine(args) as engine:
        measure(engine, args, names)


if __name__ == "__main__":
    main()
