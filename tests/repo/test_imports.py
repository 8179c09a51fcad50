"""Who may import whom: the arrows of ARCHITECTURE.md, by reading the source."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, imports, module_name, python_files

# room -> the jaxvllm modules that its files may import (and everything below them). A room's own files may
# always import each other; a room that isn't listed (engine, cli, ...) may import anything.
CONFIG = ("jaxvllm.config", "jaxvllm.rope", "jaxvllm.architectures")
ALLOWED = {
    "jaxvllm.rope": (),
    "jaxvllm.architectures": (),
    "jaxvllm.config": ("jaxvllm.rope", "jaxvllm.architectures"),
    "jaxvllm.sampling_params": (),
    "jaxvllm.outputs": (),
    "jaxvllm.detokenizer": (),
    "jaxvllm.tokenizer": ("jaxvllm.detokenizer",),
    "jaxvllm.core": (*CONFIG, "jaxvllm.sampling_params"),
    "jaxvllm.recording": ("jaxvllm.core",),
    "jaxvllm.replay": ("jaxvllm.core", "jaxvllm.recording", "jaxvllm.sampling_params"),
    "jaxvllm.drawing": ("jaxvllm.core", "jaxvllm.replay", "jaxvllm.drawing_page"),
    "jaxvllm.drawing_page": (),
    "jaxvllm.kernels": (),
    "jaxvllm.models": (*CONFIG, "jaxvllm.kernels"),
    "jaxvllm.runtime": (
        *CONFIG,
        "jaxvllm.models",
        "jaxvllm.kernels",
        "jaxvllm.core.plan",
        "jaxvllm.core.buckets",
        "jaxvllm.core.knobs",
    ),
    "jaxvllm.convert": (*CONFIG, "jaxvllm.models"),
    "jaxvllm.distributed": ("jaxvllm.config",),
}
# room -> the only third-party packages that its files may import
THIRD_PARTY = {
    "jaxvllm.rope": set(),
    "jaxvllm.architectures": set(),
    "jaxvllm.config": set(),
    "jaxvllm.sampling_params": {"numpy"},
    "jaxvllm.outputs": set(),
    "jaxvllm.detokenizer": set(),
    "jaxvllm.tokenizer": {"tokenizers", "transformers"},
    "jaxvllm.core": {"numpy", "xxhash"},
    "jaxvllm.recording": {"numpy"},
    "jaxvllm.replay": {"numpy"},
    "jaxvllm.drawing": {"matplotlib"},
    "jaxvllm.kernels": {"jax", "jaxlib"},  # jaxlib.mlir: what Pallas has no words for
    "jaxvllm.models": {"jax", "numpy"},
    "jaxvllm.distributed": {"jax", "numpy"},
    "jaxvllm.convert": {"jax", "numpy", "ml_dtypes", "orbax", "tensorstore", "tqdm", "xxhash"},
}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(module: str) -> str | None:
    return next((room for room in ALLOWED if inside(module, room)), None)


FILES = python_files("jaxvllm", "kernels", "convert")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(module_name(path))
    if room is None:
        return
    wrong = []
    for line, name in imports(path):
        top = name.partition(".")[0]
        if top == "jaxvllm":
            free = name in ("jaxvllm", "jaxvllm.__version__")
            if not free and not any(inside(name, target) for target in (room, *ALLOWED[room])):
                wrong.append(f"line {line}: {name}; {room} may import {ALLOWED[room] or 'no other room'}")
        elif top not in sys.stdlib_module_names and top not in THIRD_PARTY.get(room, {top}):
            wrong.append(f"line {line}: {name}; {room} may use {sorted(THIRD_PARTY[room]) or 'the stdlib only'}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_kernels_or_convert_by_their_folder_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files()
        for line, name in imports(path, type_checking=True)
        if name.partition(".")[0] in ("kernels", "convert")
    ]
    assert not wrong, "say jaxvllm.kernels / jaxvllm.convert:\n" + "\n".join(wrong)


def test_only_the_mesh_file_calls_shard_map() -> None:
    users = {module_name(path) for path in FILES if "shard_map(" in code_of(path)}
    assert users <= {"jaxvllm.runtime.mesh"}


def test_only_config_reads_the_environment() -> None:
    words = ("os.environ", "os.getenv", "os.putenv", "from os import environ", "from os import getenv")
    readers = {module_name(path) for path in FILES if any(word in code_of(path) for word in words)}
    assert readers <= {"jaxvllm.config"}


def code_of(path: Path) -> str:
    """The source without comments and docstrings' mentions: tokens that are neither strings nor comments."""
    import io
    import tokenize

    text = path.read_text(encoding="utf-8")
    kept = (tokenize.STRING, tokenize.COMMENT)
    words = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in kept]
    return " ".join(words).replace(" . ", ".").replace(" (", "(")


WITHOUT_JAX = ("jaxvllm", "jaxvllm.core", "jaxvllm.config", "jaxvllm.replay", "jaxvllm.drawing", "jaxvllm.cli",
               "jaxvllm.tokenizer", "bench.common")  # fmt: skip


def test_importing_these_never_imports_jax() -> None:
    """In one process, one after the other: the first that does is named."""
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "    print(name, [m for m in ('jax', 'flax', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, *WITHOUT_JAX]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{name} []" for name in WITHOUT_JAX]


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    source = "import os\nfrom . import x\nfrom ..core.plan import y\ndef f():\n    import jax.numpy as jnp\n"
    folder = ROOT / "jaxvllm" / "runtime"
    fake = tmp_path / "fake.py"
    fake.write_text(source)
    # the same text, read as if it stood in the runtime room
    found = {name for _, name in imports_as(fake, folder / "fake.py")}
    assert found == {"os", "jaxvllm.runtime.x", "jaxvllm.core.plan.y", "jax.numpy"}


def imports_as(real: Path, pretended: Path) -> list[tuple[int, str]]:
    class Pretended(type(real)):
        def read_text(self, *args: object, **kwargs: object) -> str:  # type: ignore[override]
            return real.read_text(encoding="utf-8")

    return list(imports(Pretended(pretended)))


def test_the_host_rooms_reading_order_names_every_module() -> None:
    folder = ROOT / "jaxvllm" / "core"
    order = (folder / "__init__.py").read_text().split('"""')[1]
    assert [m.stem for m in sorted(folder.glob("[a-z]*.py")) if f"`{m.stem}`" not in order] == []
