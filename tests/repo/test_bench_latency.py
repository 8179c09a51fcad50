"""bench.latency and what it shares with bench.simulate: arrivals, histogram, client; and that it runs."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench import latency_picture, report
from bench.arrivals import Mix, all_at_once, arrivals
from bench.gaps import Gaps, survival
from bench.serving import Run, Served, Source
from tests.repo.test_bench import run

POISSON = Mix(prompt_len=10, output_len=5, long_len=100, long_every=2.0)


def test_arrivals_are_poisson_with_long_prompts_by_the_clock() -> None:
    made = list(arrivals(POISSON, 50.0, num_short=20000, seed=3))
    times = np.array([time_s for time_s, _ in made])
    short = np.array([time_s for time_s, length in made if length == 10])
    assert (np.diff(times) >= 0).all() and len(short) == 20000
    between = np.diff(short, prepend=0.0)
    assert between.mean() == pytest.approx(1 / 50, rel=0.03)
    assert between.std() == pytest.approx(between.mean(), rel=0.03)  # exponential
    assert np.percentile(between, 50) == pytest.approx(np.log(2) / 50, rel=0.03)
    long = [time_s for time_s, length in made if length == 100]
    assert long == pytest.approx(np.arange(2.0, times[-1], 2.0))
    assert made == list(arrivals(POISSON, 50.0, num_short=20000, seed=3))
    assert made != list(arrivals(POISSON, 50.0, num_short=20000, seed=4))


def test_bursts_come_together_at_the_same_rate() -> None:
    bursty = Mix(10, 5, 100, long_every=0.0, burst=8)
    times = Counter(time_s for time_s, _ in arrivals(bursty, 50.0, num_short=8000, seed=0))
    assert set(times.values()) == {8}
    assert max(times) == pytest.approx(8000 / 50, rel=0.1)


def test_all_at_once_spreads_the_long_prompts() -> None:
    lengths = [length for _, length in all_at_once(POISSON, num_short=12, num_long=3)]
    assert lengths == [10, 10, 10, 10, 100] * 3
    assert POISSON.longest == 105


def test_percentiles_are_numpys_within_a_bin() -> None:
    gaps_s = np.random.default_rng(0).lognormal(-5.0, 1.5, 50000)
    gaps = Gaps()
    for part in np.split(gaps_s, 10):
        gaps.add(part)
    gaps.add(np.zeros(0))
    for percent in (1, 50, 99, 99.9):
        assert gaps.percentile_s(percent) == pytest.approx(np.percentile(gaps_s, percent), rel=0.012)
    assert gaps.longest_s == gaps_s.max()
    times_s, shares = survival(gaps.counts)
    assert shares[0] == 1.0
    for time_s, share in itertools.islice(zip(times_s, shares, strict=True), 0, None, 50):
        assert share == pytest.approx((gaps_s >= time_s * (1 - 1e-9)).mean(), abs=1e-4)


def test_a_run_counts_gaps_within_requests_only() -> None:
    run = Run([Served(0.5, 10, [1.0, 1.25, 1.75]), Served(0.0, 100, [2.0, 5.0]), Served(0.0, 10)], 0.0)
    assert sorted(run.gaps_s()) == [0.25, 0.5, 3.0]
    assert sorted(run.gaps_s(10)) == [0.25, 0.5]
    assert (run.seconds, run.served[0].first_token_s) == (5.0, 0.5)
    assert run.rate(1.0, 2.0) == 3.0  # after 1.0, up to 2.0


def test_a_backlog_keeps_some_waiting_and_ends_the_timed_ones() -> None:
    one, long = np.zeros(1, np.int32), np.zeros(9, np.int32)
    source = Source([(0.0, long), (5.0, long), (10.0, long)], [one] * 5, ahead=3)
    assert [len(prompt) for _, prompt in source.take(0.0, 0)] == [9, 1, 1]
    assert [len(prompt) for _, prompt in source.take(1.0, 3)] == []
    assert [(time_s, len(prompt)) for time_s, prompt in source.take(6.0, 0)] == [(5.0, 9), (6.0, 1), (6.0, 1)]
    assert [len(prompt) for _, prompt in source.take(7.0, 0)] == [1]
    assert source.next_time is None
    timed = Source([(1.0, one), (2.0, long)])
    assert [len(prompt) for _, prompt in timed.take(1.5, 0)] == [1]
    assert timed.next_time == 2.0


TINY = ["--config", "tiny", "--no-processors", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
TINY += ["--num-blocks", "128", "--block-size", "16", "--max-model-len", "256", "--decode-buckets", "8"]
TINY += ["--token-buckets", "64", "--prompt-len", "24", "--output-len", "6", "--long-len", "200", "--long-every", "0.3"]
TINY += ["--seconds", "0.5", "--capacity-requests", "10"]
SHARED = ["--shared-groups", "2", "--shared-group-size", "3", "--shared-prefix-len", "32", "--shared-own-len", "4"]
SHARED += ["--shared-output-len", "2", "--shared-repeats", "1", "--shared-parts", "running_first:64"]


def test_latency_runs_and_is_drawn(tmp_path: Path) -> None:
    parts = ["--only", "capacity,prefill_first:64,running_first:64,shared_prefixes"]
    rows = run("latency", tmp_path, *TINY, *SHARED, *parts)
    values = {str(row["case"]): float(str(row["value"])) for row in rows}
    assert len(values) == len(rows)
    for case in ("tiny prefill_first 64", "tiny running_first 64"):
        assert values[f"{case}, arrivals"] == pytest.approx(0.7 * values["tiny capacity of the mix"], rel=1e-3)
        assert values[f"{case}, completed"] > 2
        for nothing in ("not completed", "compiles after warm-up"):
            assert values[f"{case}, {nothing}"] == 0
        steps = [f"between tokens p{p}" for p in ("50", "99", "99.9")] + ["longest gap", "longest gap of all requests"]
        assert sorted(values[f"{case}, {name}"] for name in steps) == [values[f"{case}, {name}"] for name in steps]
        assert values[f"{case}, output rate"] > 0
    hits = [value for case, value in values.items() if case.endswith("prefix hits")]
    assert len(hits) == 4 and hits[1] >= hits[0]  # grouped: off, on
    latency_picture.draw(tmp_path, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    text = report.tables(report.read_rows(tmp_path), json.loads(report.PEERS.read_text(encoding="utf-8")))
    assert "| tiny running_first 64 | " in text and "longest gap, ms" in text
    assert "of all requests" not in text
