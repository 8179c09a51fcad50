"""The pictures of a recording: what is in the data, and what a real browser makes of the page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxvllm import drawing
from jaxvllm.cli import main

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS / "traces" / "five_requests_eleven_blocks.json"
VLLMS = TESTS / "traces_v1" / "cached_02.json"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def load(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", [EXAMPLE, VLLMS], ids=lambda path: path.stem)
def test_the_data_is_the_recordings(path):
    trace = load(path)
    data = drawing.frames(trace)
    assert len(data["steps"]) == len(trace["steps"])
    for drawn, recorded in zip(data["steps"], trace["steps"], strict=True):
        for field in ("scheduled", "preempted", "waiting", "running", "finished"):
            assert drawn[field] == recorded[field]
        if "free" in recorded:
            assert drawn["free"] == recorded["free"]
        held = {block for table in drawn["tables"].values() for block in table}
        assert held | set(drawn["free"]) == set(range(trace["config"]["num_blocks"]))
        assert not held & set(drawn["free"])


def test_the_page_needs_nothing_else_and_a_name_cannot_end_its_script():
    trace = load(EXAMPLE)
    trace["requests"][0]["request_id"] = "</script><b>"
    text = drawing.page(trace, "t")
    assert not re.search(r"(src|href)=|https?:|@import|url\(", text)
    assert text.count("</script>") == 1


def test_pictures_and_errors(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["trace", str(VLLMS), "-o", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["trace", str(EXAMPLE), "-o", str(tmp_path / "x.gif")]) == 1
    assert "must end in .html or .png" in capsys.readouterr().err
    for text in ("{}", "[]"):
        (tmp_path / "no.json").write_text(text)
        assert main(["trace", str(tmp_path / "no.json"), "-o", str(tmp_path / "x.html")]) == 1
        assert "is no recording" in capsys.readouterr().err


def dom(page: Path, step: int) -> str:
    """The page as a headless browser has built it."""
    assert BROWSER
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    command = [BROWSER, *options, "--virtual-time-budget=2000", "--dump-dom", f"{page.as_uri()}#{step}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_real_browser_draws_the_step_in_which_a_block_changes_hands(tmp_path):
    page = tmp_path / "five.html"
    assert main(["trace", str(EXAMPLE), "-o", str(page)]) == 0
    text = dom(page, 5)
    assert 'data-ready="yes"' in text  # the script ran to its end
    assert "step 5 of 10, decode" in text
    blocks = re.findall(r'<div class="block ([^"]*)"[^>]*><div class="soft"[^>]*>(\d+)</div><div>([^<]*)</div>', text)
    assert len(blocks) == 11
    # R4 was preempted; its block 10 is R2's second one now.
    assert ("held fresh", "10", "R2.1") in blocks
    assert [names for _, _, names in blocks][:4] == ["R0.0", "R0.1", "R1.0", "R1.1"]
    assert "\u2717" in text
    assert text.count("<tr>") >= 1 + 5 + 2 + 4


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_real_browser_draws_shared_blocks_and_hits(tmp_path):
    page = tmp_path / "v1.html"
    assert main(["trace", str(VLLMS), "-o", str(page)]) == 0
    text = dom(page, 0)
    assert "R3.0 R4.0" in text  # one block, two holders
    assert "tokens from the cache" in text
