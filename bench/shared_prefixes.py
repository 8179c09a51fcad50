"""Whether share_prefixes pays: requests that share long prefixes and arrive at once, with the switch on and off.

A part of bench.latency (--only shared_prefixes). --shared-groups groups of --shared-group-size requests: a group's
prompts begin with the same --shared-prefix-len tokens and go on with --shared-own-len of their own. "grouped": those of
a group come one after the other, so that off computes most in vain; "shuffled": in a random order.
"""

import argparse
import statistics
from collections.abc import Iterator

import numpy as np

from bench.common import Row
from bench.engines import TimedEngine, label, part_of, reschedule
from bench.serving import Source, drive

SHARED_PARTS = [("prefill_first", 8192), ("running_first", 1024)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The part's own options."""
    parser.add_argument("--shared-groups", type=int, default=8)
    parser.add_argument("--shared-group-size", type=int, default=8)
    parser.add_argument("--shared-prefix-len", type=int, default=2048)
    parser.add_argument("--shared-own-len", type=int, default=128)
    parser.add_argument("--shared-output-len", type=int, default=64)
    parser.add_argument("--shared-repeats", type=int, default=3, help="the median counts")
    parser.add_argument(
        "--shared-parts", default=SHARED_PARTS, type=lambda text: [part_of(one) for one in text.split(",")],
        help="policies and budgets (default: prefill_first:8192,running_first:1024)",
    )  # fmt: skip


def prompts_of(args: argparse.Namespace, order: str, max_id: int) -> list[np.ndarray]:
    """int32 prompts, in the order of their arrival."""
    rng = np.random.default_rng(args.seed)
    groups, each = args.shared_groups, args.shared_group_size
    prefixes = rng.integers(0, max_id, (groups, args.shared_prefix_len), dtype=np.int32)
    own = rng.integers(0, max_id, (groups * each, args.shared_own_len), dtype=np.int32)
    prompts = [np.concatenate([prefixes[n // each], own[n]]) for n in range(groups * each)]
    return prompts if order == "grouped" else [prompts[n] for n in rng.permutation(len(prompts))]


def measure(engine: TimedEngine, args: argparse.Namespace, max_id: int) -> Iterator[list[Row]]:
    """Rows of one setting after the other: until all have ended, and the median time to a first token."""
    shape = f"{args.shared_groups} x {args.shared_group_size} prompts sharing {args.shared_prefix_len}"
    for policy, budget in args.shared_parts:
        for order in ("grouped", "shuffled"):
            prompts = prompts_of(args, order, max_id)
            for share in (False, True):
                runs = []
                for _ in range(args.shared_repeats):
                    reschedule(engine, policy, budget, share_prefixes=share)
                    runs.append(drive(engine, Source((0.0, one) for one in prompts), args.shared_output_len, 60.0))
                if any(not one.finished for run in runs for one in run.served):
                    raise SystemExit(f"{policy} {budget}: not done after a minute")
                finish = statistics.median(run.seconds for run in runs)
                first = statistics.median(one.first_token_s for run in runs for one in run.served)
                hits = 100 * engine._scheduler.counters.prefix_hit_tokens / sum(map(len, prompts))
                case = f"{label(args)} {policy} {budget} {shape} {order}, share_prefixes {'on' if share else 'off'}"
                yield [
                    Row(f"{case}, time to finish", finish, "s"),
                    Row(f"{case}, median first token", first * 1e3, "ms"),
                    Row(f"{case}, prefix hits", hits, "%"),
                ]
