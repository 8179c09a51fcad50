"""Every experiment and example runs as its own program and says by its exit status whether all held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks import Checks

from tests.xla_flags import QUICK

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *args: str, xla_flags: str = "") -> subprocess.CompletedProcess[str]:
    """``python examples/SCRIPT ARGS`` from the repository's root, on the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *args],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "least"),
    [
        ("tensor_parallel_equivalence.py", 20),
        ("sampling_experiment.py", 20),
        ("prefix_cache_experiment.py", 15),
    ],
)
def test_experiment(script: str, least: int) -> None:
    result = run(script, xla_flags=QUICK)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].endswith("0 failed")
    assert sum(line.startswith("ok   ") for line in lines) >= least


def test_a_failed_check_is_a_failed_program(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks()
    assert checks.exit_code() == 1  # nothing was checked
    checks.check("one", True)
    assert checks.exit_code() == 0
    checks.check("two", False, "detail")
    assert checks.exit_code() == 1
    assert "FAIL two [detail]" in capsys.readouterr().out
