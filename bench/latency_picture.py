"""Draws what bench.latency recorded: how often two tokens of a request lie further apart than a time, and a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.gaps import BINS_PER_DECADE, DECADES, survival

COLUMNS = {
    "between tokens p50": "p50 ms",
    "between tokens p99": "p99 ms",
    "between tokens p99.9": "p99.9 ms",
    "longest gap": "longest ms",
    "first token p50": "first token p50 ms",
    "first token p99": "first token p99 ms",
    "output rate": "output tok/s",
}
TIMES = ("between tokens p99", "between tokens p99.9", "longest gap")  # also as shares of the first part's


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def recorded(folder: Path) -> tuple[str, dict[str, np.ndarray], dict[str, str], dict[str, float]]:
    """(device, counts by case, commits by case, values by row's case) of the device and model measured last."""
    lines = _lines(folder / "latency_gaps.jsonl")
    device, model = lines[-1]["device"], lines[-1]["case"].rsplit(" ", 2)[0]
    counts: dict[str, np.ndarray] = {}
    commits: dict[str, str] = {}
    for line in lines:
        if line["device"] == device and line["case"].rsplit(" ", 2)[0] == model:
            counts[line["case"]] = made = np.zeros(DECADES * BINS_PER_DECADE, np.int64)
            commits[line["case"]] = line["commit"]
            for n, count in line["counts"].items():
                made[int(n)] = count
    rows = {row["case"]: row["value"] for row in _lines(folder / "latency.jsonl") if row["device"] == device}
    return device, dict(sorted(counts.items(), key=_order)), commits, rows


def _order(item: tuple[str, Any]) -> tuple[str, int]:
    """By policy, then by budget from large to small."""
    _, policy, budget = item[0].rsplit(" ", 2)
    return policy, -int(budget)


def table(cases: list[str], rows: dict[str, float]) -> list[list[str]]:
    """A row of cells for each case; the times of TIMES also as a share of the first case's."""
    cells = []
    for case in cases:
        line = []
        for column in COLUMNS:
            value, first = rows.get(f"{case}, {column}"), rows.get(f"{cases[0]}, {column}")
            text = "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            if value and first and column in TIMES and case != cases[0]:
                text += f"  (1/{first / value:.1f})" if value <= first else f"  ({value / first:.1f} x)"
            line.append(text)
        cells.append(line)
    return cells


def draw(folder: Path, path: Path) -> None:
    """Of the rows and histograms in `folder`, into `path`. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    device, counts, commits, rows = recorded(folder)
    cases = list(counts)
    model = cases[0].rsplit(" ", 2)[0]
    names = [" ".join(case.rsplit(" ", 2)[1:]) for case in cases]
    figure, (axes, below) = pyplot.subplots(
        2, 1, figsize=(11, 7), layout="constrained", height_ratios=[4, 0.3 * (len(cases) + 1)]
    )
    for case, name in zip(cases, names, strict=True):
        times_s, shares = survival(counts[case])
        style = "--" if "prefill_first" in name else "-"
        axes.step(times_s * 1e3, shares, style, where="pre", label=f"{name} ({commits[case]})")
    axes.set(
        xscale="log", yscale="log", xlabel="ms between two tokens of a short request", ylabel="share at least as long"
    )
    axes.grid(alpha=0.3)
    axes.legend(title="policy, tokens a step (commit)")
    rate = rows.get(f"{cases[0]}, arrivals")
    load = f", {rate:.3g} requests/s" if rate else ""
    axes.set_title(f"{model}{load}, {device}")
    below.axis("off")
    made = below.table(table(cases, rows), rowLabels=names, colLabels=list(COLUMNS.values()), loc="center")
    made.auto_set_font_size(False)
    made.set_fontsize(8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(path)
