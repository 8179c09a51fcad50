"""The repository's own promises: files that must exist, commands in the README, sizes, pinned versions."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench import report
from tests.repo.sources import ROOT, python_files

MAX_LINES = 300
MAX_TEST_LINES = 500  # a table of cases may be long
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "constraints.txt",
        ".ci/run",
    ],
)
def test_the_file_exists(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_no_file_is_longer_than_it_should_be() -> None:
    long = {}
    for path in python_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = MAX_TEST_LINES if path.is_relative_to(ROOT / "tests") else MAX_LINES
        if lines > limit:
            long[str(path.relative_to(ROOT))] = f"{lines} lines, at most {limit}"
    assert not long, f"split {long}"


def test_links_are_relative_and_point_to_the_top_level_folders() -> None:
    for name in ("kernels", "convert"):
        assert os.readlink(ROOT / "jaxvllm" / name) == f"../{name}"


def test_the_readmes_make_targets_and_files_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z][a-z-]*)\b", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README names make {target}"
    for module in set(re.findall(r"python -m ((?:bench|jaxvllm)\.[a-z_.]+[a-z])", text)):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists() or (
            ROOT / module.replace(".", "/") / "__main__.py"
        ).exists(), f"README names python -m {module}"
    for link in set(re.findall(r"\]\(([^)#:]+)\)", text)):
        assert (ROOT / link).exists(), f"README links to {link}"


def test_the_readmes_figures_are_those_of_the_rows() -> None:
    assert report.main(["--check"]) == 0


def test_the_constraints_pin_every_direct_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    pinned = {name.replace("_", "-"): version for name, version in pinned.items()}
    assert pinned["jax"] == pinned["jaxlib"] == "0.11.2"
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=~ ]", requirement)[0].replace("_", "-") for requirement in wanted}
    assert names <= set(pinned)
    for requirement in wanted:
        name, exact, version = requirement.partition("==")
        if exact:
            assert pinned[name.partition("[")[0].replace("_", "-")] == version


def test_the_version_is_the_same_everywhere() -> None:
    import jaxvllm

    assert jaxvllm.__version__ == PROJECT["version"]


def test_ci_passes_the_exit_status_of_make_test_through(tmp_path: Path) -> None:
    """.ci/run in a folder whose Makefile fails: it must print what make prints, and fail."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    for status, recipe in ((0, "@echo CI=$$CI ran"), (2, "@echo CI=$$CI ran; exit 3")):
        (tmp_path / "Makefile").write_text(f"test:\n\t{recipe}\n")
        done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status
        assert "CI=true ran" in done.stdout


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("JAXVLLM_TEST_GPU", "1", "no GPU is visible to jax"),
        ("JAXVLLM_QWEN3", "nowhere", "'nowhere' is not a directory"),
    ],
)
def test_what_a_test_run_lacks_is_one_clear_error(setting: str, value: str, message: str) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", setting: value}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", "tests/golden/test_real.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize("home", ["pyenv", "empty"])
def test_find_python_knows_pyenv_and_fails_clearly(tmp_path: Path, home: str) -> None:
    """No python on PATH: one that only pyenv knows is found; without any, the message says what to do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "ls", "sort", "cat"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    python = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / home)}
    done = subprocess.run(["sh", str(ROOT / "scripts" / "find_python.sh")], env=env, capture_output=True, text=True)
    if home == "pyenv":
        assert done.stdout.strip() == str(python)
    else:
        assert done.returncode == 1
        assert "no Python >= 3.12" in done.stderr
        assert "make PYTHON=" in done.stderr
