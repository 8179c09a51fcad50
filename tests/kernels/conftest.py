"""Mosaic's interpreter looks for races, and says so in print alone: here any test that has one fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
