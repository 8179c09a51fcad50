"""Draws what bench.mesh recorded: step times, tokens/s, all-reduces and efficiency, by bucket and number of devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import PEERS, read_rows

type RowsOfMesh = dict[str, dict[str, Any]]  # by bucket, in the order of measuring


def recorded(folder: Path) -> dict[int, RowsOfMesh]:
    """Rows by number of devices, then by bucket ("decode batch 8"), of the configuration and device measured last.

    Raises SystemExit where there are none.
    """
    rows = [row for row in read_rows(folder) if row["bench"] == "mesh"] if (folder / "mesh.jsonl").is_file() else []
    if not rows:
        raise SystemExit(f"{folder / 'mesh.jsonl'} has no rows: run python -m bench.mesh first")
    last = json.loads((folder / "mesh.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    meshes: dict[int, RowsOfMesh] = {}
    for row in rows:
        if row["device"] == last["device"] and config_of(row) == config_of(last):
            meshes.setdefault(row["tensor_parallel_size"], {})[bucket_of(row)] = row
    return dict(sorted(meshes.items()))


def bucket_of(row: dict[str, Any]) -> str:
    """ "qwen3-8b tp2 decode batch 8" -> "decode batch 8"."""
    for kind in ("decode batch ", "prefill "):
        if (at := row["case"].find(f" {kind}")) >= 0:
            return row["case"][at + 1 :]
    raise ValueError(f"case={row['case']!r} is neither a decode batch nor a prefill")


def config_of(row: dict[str, Any]) -> str:
    """ "qwen3-8b tp2 decode batch 8" -> "qwen3-8b"; what else its label says stays, the number of devices goes."""
    words = row["case"].removesuffix(bucket_of(row)).split()
    return " ".join(word for word in words if word != f"tp{row['tensor_parallel_size']}")


def draw(folder: Path, path: Path) -> None:
    """Of the rows in `folder`, into `path`. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    meshes = recorded(folder)
    first = next(iter(meshes.values()))
    buckets = list(dict.fromkeys(bucket for rows in meshes.values() for bucket in rows))
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")

    def lines(axis: Any, value: Callable[[dict[str, Any]], float | None], style: str, of: str, **more: Any) -> None:
        """A line for each mesh that has values, in the mesh's colour."""
        for n, (size, rows) in enumerate(meshes.items()):
            known = [(i, v) for i, b in enumerate(buckets) if b in rows and (v := value(rows[b]))]
            if known:
                axis.plot(*zip(*known, strict=True), style, color=f"C{n}", label=f"{named(size)}{of}", **more)

    lines(axes[0, 0], lambda row: row["value"], "o-", "")
    lines(axes[0, 0], lambda row: row["floor"], ":", ", hardware's limit")
    for column, peer, marker in peers(next(iter(first.values()))["device"]):
        lines(axes[0, 0], peer, marker, f", {column}", linewidth=0)
    axes[0, 0].set(ylabel="ms", title="a step's time", yscale="log")
    lines(axes[0, 1], lambda row: row["tokens_per_s"], "o-", "")
    axes[0, 1].set(ylabel="tokens/s", title="tokens in a second of such steps", yscale="log")
    for name, style in zip(sums(meshes), ("o-", "s--", "^:", "v-."), strict=False):
        lines(axes[1, 0], lambda row, name=name: row["all_reduce_ms"].get(name), style, f", {name}")
    axes[1, 0].set(ylabel="ms", title="its all-reduces alone", yscale="log" if sums(meshes) else "linear")
    lines(axes[1, 1], lambda row: row["efficiency"] * 100, "o-", "")
    axes[1, 1].set(ylabel="%", title=f"efficiency: speed-up over {named(next(iter(meshes)))}, per device")
    axes[1, 1].set_ylim(bottom=0)
    for axis in axes.flat:
        axis.set_xticks(range(len(buckets)), buckets, rotation=20, ha="right", fontsize=8)
        axis.set_xlim(-0.3, len(buckets) - 0.7)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    one = next(iter(first.values()))
    commits = dict.fromkeys(row["commit"] for rows in meshes.values() for row in rows.values())
    figure.suptitle(f"{config_of(one)}, {one['device']}, commit {', '.join(map(str, commits))}, {one['date']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(path)


def named(size: int) -> str:
    return "1 device" if size == 1 else f"{size} devices"


def sums(meshes: dict[int, RowsOfMesh]) -> list[str]:
    """Names of the all-reduces that took any time, on any mesh."""
    rows = [row for mesh in meshes.values() for row in mesh.values()]
    return list(dict.fromkeys(name for row in rows for name, ms in row["all_reduce_ms"].items() if ms > 0))


def peers(device: str) -> list[tuple[str, Callable[[dict[str, Any]], float | None], str]]:
    """(column, row -> its figure, marker) of each peer, if they were measured on this device."""
    known = json.loads(PEERS.read_text(encoding="utf-8"))
    if known["device"] not in device:
        return []
    none = [None] * len(known["columns"])
    return [
        (column, lambda row, n=n: known["figures"].get(row["case"], none)[n], "xP*"[n])
        for n, column in enumerate(known["columns"])
    ]
