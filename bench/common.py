"""What every benchmark shares: its command line, and the rows it writes. Imports no jax.

A row is {bench, case, value, unit, floor, device, jax, commit, command, date}; floor is the least (or, for a
rate, the most) that the hardware allows in the row's unit, None where there is no such bound. Rows of benchmarks with
a --tensor-parallel-size hold tensor_parallel_size, too; without it, a row is one device's.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. case tells the configuration within the benchmark, like "qwen3-0.6b decode batch 64"; more: other
    fields of the row, by name."""

    case: str
    value: float
    unit: str
    floor: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `doc` is its module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows (default: bench/results)")
    made.add_argument("--commit", help="commit to write into the rows where there is no git checkout")
    return made


def record(bench: str, rows: Sequence[Row], *, device: str, args: argparse.Namespace) -> None:
    """Appends the rows to OUT/bench.jsonl and prints them, one JSON object a line."""
    args.out.mkdir(parents=True, exist_ok=True)
    common = {
        "device": device,
        "jax": version("jax"),
        "commit": args.commit or commit(),
        "command": command(bench),
        "date": time.strftime("%Y-%m-%d"),
    }
    if (parallel := getattr(args, "tensor_parallel_size", None)) is not None:
        common["tensor_parallel_size"] = parallel
    with (args.out / f"{bench}.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            floor = None if row.floor is None else rounded(row.floor)
            head = {"bench": bench, "case": row.case, "value": rounded(row.value), "unit": row.unit}
            line = json.dumps(head | {"floor": floor} | common | dict(row.more))
            file.write(line + "\n")
            print(line, flush=True)


def command(bench: str) -> str:
    """The command line that gives these rows, without the options that only say where they go."""
    kept: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--out", "--commit"):
            next(words, None)
        elif not word.startswith(("--out=", "--commit=")):
            kept.append(shlex.quote(word))
    return " ".join(["python -m", f"bench.{bench}", *kept])


def commit() -> str | None:
    """Short hash of the checkout, with "+" when tracked files are changed; None outside git."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    # rows of this very run don't make a checkout dirty
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return f"{head}+" if head and changed else head


def versions() -> dict[str, str]:
    """Versions that a figure depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "numpy", "flax")}


def cpu_name() -> str:
    """Model name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def accelerator_name(count: int = 1) -> str:
    """Kind of jax's first device, with the number used when it is more than one. Starts jax's backend."""
    import jax

    kind = jax.devices()[0].device_kind
    kind = cpu_name() if kind == "cpu" else kind
    return kind if count == 1 else f"{count} x {kind}"


def rounded(value: float) -> float:
    """Five significant digits: more are noise, and whole numbers stay whole."""
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
