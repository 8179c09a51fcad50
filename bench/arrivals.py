"""The mixed workload of bench.simulate and bench.latency: short requests at random times, long prompts by the clock.

Owns: when requests come and how long they are. Must not know: who serves them, and what they cost. No jax.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Mix:
    """prompt_len / output_len: of short requests, tokens; a long prompt has the same output_len.

    long_every: seconds between prompts of long_len tokens, the first after one such time; 0: none.
    burst: short requests that come together.
    """

    prompt_len: int = 1024
    output_len: int = 256
    long_len: int = 16384
    long_every: float = 5.0
    burst: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.prompt_len, self.long_len if self.long_every else 0) + self.output_len


def add_mix_options(parser: argparse.ArgumentParser) -> None:
    """--prompt-len and the like, for ``mix_of``; --load or --rate, and --seed, of the arrivals."""
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--long-len", type=int, default=16384)
    parser.add_argument("--long-every", type=float, default=5.0, help="seconds; 0: no long prompts")
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity")
    parser.add_argument("--rate", type=float, help="short requests a second, instead of --load")
    parser.add_argument("--seed", type=int, default=0)


def mix_of(args: argparse.Namespace) -> Mix:
    """What the options ask for; where there is an option --arrivals, "bursty" makes bursts of --burst."""
    burst = args.burst if getattr(args, "arrivals", "poisson") == "bursty" else 1
    return Mix(args.prompt_len, args.output_len, args.long_len, args.long_every, burst)


def arrivals(mix: Mix, rate: float, *, num_short: int, seed: int) -> Iterator[tuple[float, int]]:
    """(time in s, prompt length), in order: Poisson arrivals of `rate` short requests a second (of bursts, rate /
    burst), and the long ones that fall between them. Ends with the last of `num_short`."""
    rng = np.random.default_rng(seed)
    now, next_long = 0.0, mix.long_every or np.inf
    made = 0
    while made < num_short:
        now += rng.exponential(mix.burst / rate)
        while next_long <= now:
            yield next_long, mix.long_len
            next_long += mix.long_every
        for _ in range(min(mix.burst, num_short - made)):
            yield now, mix.prompt_len
            made += 1


def all_at_once(mix: Mix, *, num_short: int, num_long: float) -> Iterator[tuple[float, int]]:
    """Everything at time 0, the long prompts spread evenly among the short ones."""
    every = max(1, int(num_short / num_long)) if num_long else 0
    for n in range(num_short):
        yield 0.0, mix.prompt_len
        if every and n % every == every - 1:
            yield 0.0, mix.long_len
