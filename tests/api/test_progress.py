"""The progress bar's rates."""

import re

import pytest

from jaxvllm import progress
from jaxvllm.core.step import Counters


def test_the_first_step_counts_and_what_came_before_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 prompt tokens in the only step, 2 s after the bar began: 500 a second, whatever earlier calls did."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    counters = Counters(prefill_tokens=70_000, decode_tokens=9_000)
    with progress.Progress(1, counters, enabled=True) as bar:
        now[0] += 2
        counters.prefill_tokens += 1_000
        counters.decode_tokens += 20
        bar.finished_one()
        bar.show(counters)
    rates = re.findall(r"prefill ([\d,]+) tok/s, decode ([\d,]+) tok/s", capsys.readouterr().err)
    assert rates[-1] == ("500", "10")
