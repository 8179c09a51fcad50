"""Turns the rows of bench/results into the README's tables, and into pictures where matplotlib is installed.

Runs on several devices have tables of their own: their rows name another device ("2 x NVIDIA H200"). bench.mesh's one
table holds all meshes, its cases and columns tell them apart.

python -m bench.report              rewrites the part of README.md between the two markers
python -m bench.report --check      changes nothing; exit status 1 if that part isn't what the rows give
python -m bench.report --pictures   also writes bench/results/*.png

Of several rows for the same case and device the last one counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.common import RESULTS, ROOT

BEGIN, END = "<!-- bench.report: begin -->", "<!-- bench.report: end -->"
PEERS = ROOT / "bench" / "peers.json"
TITLES = {
    "throughput": "Whole runs",
    "steps": "Single steps",
    "mesh": "The same steps on several numbers of devices",
    "processors": "Processors, log-probabilities, new weights",
    "ceilings": "Ceilings of the machine",
    "host": "Host work of a decode step",
    "latency": "Requests that arrive by themselves",
    "convert": "Converting and loading checkpoints",
}
WIDE = {
    "latency": (
        ("arrivals", "output rate", "first token p50", "first token p99", "between tokens p50", "between tokens p99",
         "between tokens p99.9", "longest gap"),
        ("time to finish", "median first token", "prefix hits"),
    ),
}  # fmt: skip
"""Benches with many figures a case: tables with a column for each of these, the ends of "case, figure"; no others."""
FIELDS = {
    "mesh": {"tokens_per_s": "tokens/s", "all_reduce_ms": "all-reduces alone, {}, ms", "speed_up": "speed-up",
             "efficiency": "efficiency"},
}  # fmt: skip
"""Benches with more figures in a row: a column for each of these fields; for each key of one that holds several."""
Rows = list[dict[str, Any]]


def read_rows(folder: Path) -> Rows:
    """The last row of each (bench, case, device), in the order in which they first appeared."""
    latest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if all(key in row for key in ("bench", "case", "value", "unit", "device")):
                latest[row["bench"], row["case"], row["device"]] = row
    return list(latest.values())


def tables(rows: Rows, peers: dict[str, Any]) -> str:
    """Markdown: one table for each benchmark and device, each followed by where its figures come from."""
    parts: list[str] = []
    for bench in TITLES:
        mine = [row for row in rows if row["bench"] == bench]
        for device in dict.fromkeys(row["device"] for row in mine):
            of_device = [row for row in mine if row["device"] == device]
            parts.append(f"**{TITLES[bench]}, {device}**\n")
            if bench in WIDE:
                parts += [table for columns in WIDE[bench] if (table := _wide_table(of_device, columns))]
            else:
                parts.append(_table(of_device, peers if peers["device"] in device else None, FIELDS.get(bench, {})))
            parts.append(_origins(of_device))
    if not parts:
        return "No figures are recorded yet.\n"
    if any(row["case"] in peers["figures"] and peers["device"] in row["device"] for row in rows):
        parts.append(f"Peers: {peers['conditions']}\n")
    return "\n".join(parts)


def _table(rows: Rows, peers: dict[str, Any] | None, fields: Mapping[str, str] | None = None) -> str:
    """One line for each row: its value, peers' figures (of those who have one here), its floor, fields of its own."""
    figures = [peers["figures"].get(row["case"], []) for row in rows] if peers else []
    others = (
        [(n, name) for n, name in enumerate(peers["columns"]) if any(f[n : n + 1] not in ([], [None]) for f in figures)]
        if peers
        else []
    )
    limits = ["hardware's limit"] if any(row.get("floor") is not None for row in rows) else []
    more = _fields(rows, fields or {})
    columns = ["", "jaxvllm" if others else "measured", *(name for _, name in others), *limits, "unit", *more]
    right = len(columns) - 2 - len(more)
    lines = [_line(columns), _line(["---"] + ["---:"] * right + ["---"] + ["---:"] * len(more))]
    for i, row in enumerate(rows):
        numbers = [row["value"], *(figures[i][n] if figures[i] else None for n, _ in others)]
        numbers += [row["floor"]] if limits else []
        lines.append(
            _line([row["case"], *map(_number, numbers), row["unit"], *(_number(of(row)) for of in more.values())])
        )
    return "\n".join(lines) + "\n"


def _fields(rows: Rows, fields: Mapping[str, str]) -> dict[str, Callable[[dict[str, Any]], float | None]]:
    """Column -> what a row has there, for the fields that any row has."""
    columns: dict[str, Callable[[dict[str, Any]], float | None]] = {}
    for name, title in fields.items():
        for row in rows:
            if isinstance(row.get(name), dict):
                columns |= {
                    title.format(key): lambda row, n=name, key=key: row.get(n, {}).get(key) for key in row[name]
                }
            elif name in row:
                columns[title] = lambda row, n=name: row.get(n)
    return columns


def _wide_table(rows: Rows, columns: Iterable[str]) -> str:
    """One line for each case that has any of the columns; "" if none has."""
    cells: dict[str, dict[str, float]] = {}
    units: dict[str, str] = {}
    for row in rows:
        case, _, column = row["case"].rpartition(", ")
        if column in columns:
            cells.setdefault(case, {})[column] = row["value"]
            units[column] = row["unit"]
    shown = [column for column in columns if column in units]
    if not cells:
        return ""
    lines = [_line(["", *(f"{column}, {units[column]}" for column in shown)]), _line(["---"] + ["---:"] * len(shown))]
    lines += [_line([case, *(_number(line.get(column)) for column in shown)]) for case, line in cells.items()]
    return "\n".join(lines) + "\n"


def _origins(rows: Rows) -> str:
    keys = ("command", "commit", "date", "jax")
    origins = dict.fromkeys(tuple(row.get(key) for key in keys) for row in rows)
    return "\n".join(f"`{o[0]}` at commit {o[1] or '(unknown)'}, {o[2]}, jax {o[3]}.  " for o in origins) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    """Four significant digits; thousands get commas."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def replaced(text: str, inside: str) -> str:
    """`text` with the part between the markers replaced; ValueError if they aren't there once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each, in this order")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{inside}\n{END}{rest.partition(END)[2]}"


def draw(rows: Rows, peers: dict[str, Any], folder: Path) -> list[Path]:
    """One picture a configuration: decode step times by batch size, with peers and the hardware's limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    steps = [row for row in rows if row["bench"] == "steps" and " decode batch " in row["case"]]
    for name in dict.fromkeys((row["case"].partition(" decode batch ")[0], row["device"]) for row in steps):
        config, device = name
        mine = sorted(
            (int(row["case"].rpartition(" ")[2]), row)
            for row in steps
            if row["case"].startswith(f"{config} decode batch ") and row["device"] == device
        )
        batches = [batch for batch, _ in mine]
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(batches, [row["value"] for _, row in mine], "o-", label="jaxvllm")
        if peers["device"] in device:
            for n, peer in enumerate(peers["columns"]):
                figures = [(b, peers["figures"].get(row["case"], [None] * 9)[n]) for b, row in mine]
                known = [(b, value) for b, value in figures if value is not None]
                if known:
                    axes.plot(*zip(*known, strict=True), "s--", label=peer)
        limits = [(b, row["floor"]) for b, row in mine if row["floor"] is not None]
        if limits:
            axes.plot(*zip(*limits, strict=True), "k:", label="hardware's limit")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="sequences in the step",
            ylabel="ms",
            title=f"{config}, {device}",
        )
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.legend()
        path = folder / f"decode {config} {device}.png".replace(" ", "-").lower()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="only say whether the README is up to date")
    parser.add_argument("--pictures", action="store_true", help="draw pictures too (needs matplotlib)")
    args = parser.parse_args(argv)
    rows, peers = read_rows(args.results), json.loads(PEERS.read_text(encoding="utf-8"))
    text = args.readme.read_text(encoding="utf-8")
    new = replaced(text, tables(rows, peers))
    if args.check:
        if new != text:
            print(f"{args.readme} isn't what the rows give: run python -m bench.report", file=sys.stderr)
        return int(new != text)
    args.readme.write_text(new, encoding="utf-8")
    if args.pictures:
        for path in draw(rows, peers, args.results):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
