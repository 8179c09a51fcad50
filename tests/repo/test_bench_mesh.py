"""bench.mesh on fake devices: rows of each mesh, what is skipped, the chain of all-reduces, table and picture."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench import mesh as bench_mesh
from bench import report
from bench.all_reduce import ALL_REDUCES, all_reduces_s, chain
from bench.mesh_picture import bucket_of, config_of, recorded
from jaxvllm.runtime.mesh import TP, make_mesh
from tests.repo.test_bench import SMALL, run

OPTIONS = ["--buckets", "4", "--prefill", "2x12", "--prompt-len", "12", "--new-tokens", "16", "--repeats", "1"]


def test_mesh_measures_each_mesh_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = run("mesh", tmp_path, *SMALL, "--no-processors", *OPTIONS, "--meshes", "1,2,1000")
    assert [row["case"] for row in rows] == [
        f"{mesh} {bucket}" for mesh in ("tiny", "tiny tp2") for bucket in ("decode batch 4", "prefill 2x12")
    ]
    assert "tensor_parallel_size=1000 needs that many devices" in capsys.readouterr().err
    for row, first, tokens in zip(rows, rows[:2] * 2, (4, 24) * 2, strict=True):
        size = row["tensor_parallel_size"]
        assert (row["unit"], size) == ("ms", 2 if "tp2" in row["case"] else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens * 1e3 / row["value"], rel=1e-3)
        assert row["speed_up"] == pytest.approx(first["value"] / row["value"], rel=1e-3)
        assert row["efficiency"] == pytest.approx(row["speed_up"] / size, rel=1e-3)
        assert list(row["all_reduce_ms"]) == ["psum"] and (size > 1 or row["all_reduce_ms"]["psum"] == 0)
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    text = report.tables(report.read_rows(tmp_path), json.loads(report.PEERS.read_text(encoding="utf-8")))
    assert "all-reduces alone, psum, ms | speed-up | efficiency |" in text and "| tiny tp2 decode batch 4 | " in text


def row_of(case: str, size: int, value: float, device: str = "NVIDIA H200") -> dict[str, Any]:
    figures = {
        "tokens_per_s": 1e3 / value,
        "all_reduce_ms": {"psum": 0.1 * (size - 1)},
        "speed_up": 1.0,
        "efficiency": 0.5,
    }
    common = {"unit": "ms", "floor": 3.0, "jax": "x", "commit": "abc", "command": "x", "date": "x"}
    return {
        "bench": "mesh",
        "case": case,
        "value": value,
        "device": device,
        "tensor_parallel_size": size,
        **common,
        **figures,
    }


def test_recorded_rows_alone_are_drawn_beside_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row_of("qwen3-8b decode batch 8", 1, 9.0),
        row_of("qwen3-8b decode batch 8", 1, 6.0),
        row_of("qwen3-0.6b decode batch 8", 1, 2.0),
        row_of("qwen3-8b tp2 decode batch 8", 2, 4.0),
        row_of("qwen3-8b tp2 prefill 16x1024", 2, 250.0),
    ]
    (tmp_path / "mesh.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = recorded(tmp_path)
    assert {size: {bucket: row["value"] for bucket, row in mesh.items()} for size, mesh in kept.items()} == {
        1: {"decode batch 8": 6.0},
        2: {"decode batch 8": 4.0, "prefill 16x1024": 250.0},
    }
    monkeypatch.setattr("sys.argv", ["mesh", "--draw-only", "--out", str(tmp_path)])
    bench_mesh.main()
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    text = report.tables(report.read_rows(tmp_path), json.loads(report.PEERS.read_text(encoding="utf-8")))
    assert "| qwen3-8b tp2 decode batch 8 | 4 | 4.06 |  | 3 | ms | 250 | 0.1 | 1 | 0.5 |" in text


def test_several_devices_have_a_table_of_their_own_without_empty_columns(tmp_path: Path) -> None:
    one, two = (
        row_of("qwen3-8b decode batch 8", 1, 6.0),
        row_of("qwen3-8b tp2 decode batch 8", 2, 4.0, "2 x NVIDIA H200"),
    )
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row | {"bench": "steps"}) + "\n" for row in (one, two)))
    text = report.tables(report.read_rows(tmp_path), json.loads(report.PEERS.read_text(encoding="utf-8")))
    of_one, of_two = text.split("**Single steps, 2 x NVIDIA H200**")
    assert "tp2" not in of_one and "| qwen3-8b decode batch 8 | 6 | 5.71 | 6.26 | 3 | ms |" in of_one
    assert "nano-vLLM" not in of_two.partition("Peers:")[0]
    assert "| qwen3-8b tp2 decode batch 8 | 4 | 4.06 | 3 | ms |" in of_two


def test_nothing_recorded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mesh", "--draw-only", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"run python -m bench\.mesh first"):
        bench_mesh.main()


def test_names_of_cases() -> None:
    row = row_of("qwen3-8b tp2 running_first 512 decode batch 8", 2, 4.0)
    assert (config_of(row), bucket_of(row)) == ("qwen3-8b running_first 512", "decode batch 8")
    assert config_of(row_of("qwen3-8b decode batch 8", 1, 4.0)) == "qwen3-8b"


def test_the_chain_has_a_sum_a_link_and_without_sums_as_many_scalings() -> None:
    mesh, links = make_mesh(4), 6
    x = jax.device_put(jnp.arange(4.0 * 6).reshape(4, 2, 3), NamedSharding(mesh, PartitionSpec(TP)))
    scale = jnp.float32(0.25)
    chains = [jax.jit(chain(mesh, reduce, links)) for reduce in (ALL_REDUCES["psum"], None)]
    with_sums, without = (lambda x, scale, run=run: run(x, scale, None) for run in chains)
    jaxpr = [str(jax.make_jaxpr(function)(x, scale)) for function in (with_sums, without)]
    assert [text.count("psum") for text in jaxpr] == [links, 0]
    assert [text.count("optimization_barrier") for text in jaxpr] == [links, links]
    assert with_sums(x, scale) == pytest.approx(jnp.broadcast_to(x.mean(axis=0), x.shape))  # the mean of means
    assert without(x, scale) == pytest.approx(x * 0.25**links)


def test_an_all_reduce_is_found_by_name_and_its_sums_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(2)
    with pytest.raises(ValueError, match="all_reduce='nccl' is unknown; known: psum, exchange"):
        all_reduces_s(mesh, "nccl", (2, 8), "float32", 4, repeats=1, calls=1)
    with pytest.raises(ValueError, match="needs Hopper GPUs"):
        all_reduces_s(mesh, "exchange", (2, 8), "float32", 4, repeats=1, calls=1)
    monkeypatch.setitem(ALL_REDUCES, "own part", lambda x, link, exchange: x)
    with pytest.raises(RuntimeError, match="'own part' sums wrongly over 2 devices"):
        all_reduces_s(mesh, "own part", (2, 8), "float32", 4, repeats=1, calls=1)
    assert all_reduces_s(make_mesh(1), "psum", (2, 8), "float32", 4, repeats=1, calls=1) == 0
