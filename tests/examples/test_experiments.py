"""Every experiment and example says by its exit status whether all held.

They run as programs of their own, as users start them; the one that says nothing to XLA before jax starts, here.
"""

from __future__ import annotations

import os
import runpy
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


def check(output: str, least: int) -> None:
    lines = output.splitlines()
    assert lines[-1].endswith("0 failed")
    assert sum(line.startswith("ok   ") for line in lines) >= least


@pytest.mark.parametrize(
    ("script", "least"), [("tensor_parallel_equivalence.py", 20), ("prefix_cache_experiment.py", 15)]
)
def test_experiment(script: str, least: int) -> None:
    result = run(script, xla_flags=QUICK)
    assert result.returncode == 0, result.stdout + result.stderr
    check(result.stdout, least)


def test_sampling_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "sampling_experiment.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert ended.value.code == 0, output
    check(output, 20)


def test_a_failed_check_is_a_failed_program(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks()
    assert checks.exit_code() == 1  # nothing was checked
    checks.check("one", True)
    assert checks.exit_code() == 0
    checks.check("two", False, "detail")
    assert checks.exit_code() == 1
    assert "FAIL two [detail]" in capsys.readouterr().out
