"""The wheel holds kernels and convert under jaxvllm, although those two are links in the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, python_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="the dev extra has it; a wheel can't be built without")
    source = tmp_path_factory.mktemp("source") / "jaxvllm"
    unwanted = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "*.egg-info", "tests", "examples")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    target = source.parent / "wheel"
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        str(target),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_it_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "jaxvllm = jaxvllm.cli:main" in archive.read(entry_points).decode()
    expected = {str(path.relative_to(ROOT)) for path in python_files("jaxvllm")}
    expected |= {f"jaxvllm/{path.relative_to(ROOT)}" for path in python_files("kernels", "convert")}
    assert names == expected


def test_it_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import jaxvllm, jaxvllm.kernels, jaxvllm.convert, jaxvllm.cli, importlib.util\n"
        "print(jaxvllm.__file__)\n"
        "print([n for n in ('kernels', 'convert') if importlib.util.find_spec(n)])\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(tmp_path / "jaxvllm" / "__init__.py"), "[]"]
