"""Appends the result of a `make test-newest` run to a record that is committed: one JSON line a run.

python scripts/record_newest.py REPORT.xml RECORD.jsonl TESTS   (REPORT.xml: pytest's --junitxml)
Exits 1 when the run had failures or errors, or ran nothing.
"""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path


def summary(report: Path) -> dict[str, int | float]:
    """Counts and seconds over all suites of a junit report."""
    total: dict[str, int | float] = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        total["passed"] += int(suite.get("tests", 0)) - bad - skipped
        total["failed"] += bad
        total["skipped"] += skipped
        total["seconds"] = round(total["seconds"] + float(suite.get("time", 0)), 1)
    return total


def main(report: str, record: str, tests: str) -> int:
    counts = summary(Path(report))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or None,
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": sys.version.split()[0],
        **counts,
        "command": "make test-newest" if tests == "tests" else f"make test-newest TESTS={tests!r}",
    }
    with Path(record).open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))
    return int(counts["failed"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
