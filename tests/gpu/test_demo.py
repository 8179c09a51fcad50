"""`make demo` on a GPU: the same checks of its text as on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.examples import demo_output
from tests.gpu.support import record

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_its_text_is_made_of_the_texts_words() -> None:
    result = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"tokens/s on {jax.devices()[0].device_kind}" in result.stdout
    record([("demo, known words of its continuations", demo_output.check(result.stdout), "of 1", None)])
