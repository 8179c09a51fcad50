"""The README's examples run as they stand there."""

import re

import pytest

from tests.kept_programs import kept_programs
from tests.repo.sources import ROOT


def test_the_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "examples" / "tiny-kjv" / "config.json").exists():
        pytest.skip("examples/tiny-kjv isn't there")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    assert len(examples) == 3
    with kept_programs():  # the three make engines of the same shapes
        for example in examples:
            exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out
    assert "In the beginning" in lines
    assert "And the king said" in lines
    assert re.search(r" (length|stop)$", lines, re.MULTILINE)
    assert re.search(r"^one ['\"]", lines, re.MULTILINE)
