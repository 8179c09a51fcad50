"""The project's Python files, and what each one imports, by reading the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxvllm", "kernels", "convert", "bench", "examples", "scripts", "tests")


def python_files(*folders: str) -> list[Path]:
    """Files under these top-level folders, each once (jaxvllm/kernels and jaxvllm/convert are links)."""
    found = []
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts and path.resolve() == path:
                found.append(path)
    return found


def module_name(path: Path) -> str:
    """Import name of a file: kernels/x.py is jaxvllm.kernels.x, as everyone spells it."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("kernels", "convert"):
        parts.insert(0, "jaxvllm")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, type_checking: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import, also inside functions; `from a import b` gives "a.b".

    Imports under `if TYPE_CHECKING:` never run and count only when asked for.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not type_checking:
            skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
