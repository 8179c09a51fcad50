"""Benchmarks: workload and floors against published figures, the rows' shape, and that each one runs."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import models, report, workload
from tests.kept_programs import kept_programs
from tests.repo.sources import ROOT
from tests.xla_flags import QUICK

ROW_KEYS = {"bench", "case", "value", "unit", "floor", "device", "jax", "commit", "command", "date"}
MESH_KEYS = {"tokens_per_s", "all_reduce_ms", "speed_up", "efficiency"}
ON_ONE_DEVICE = {"host", "ceilings", "kernels"}


def run(module: str, out: Path, *options: str, alone: bool = False) -> list[dict[str, object]]:
    """The rows of a benchmark's main program. alone: in a process of its own, as users start it."""
    arguments = [*options, "--out", str(out), "--commit", "abc"]
    if alone:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
        command = [sys.executable, "-m", f"bench.{module}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        with pytest.MonkeyPatch.context() as patched, kept_programs():
            patched.setattr(sys, "argv", [str(ROOT / "bench" / f"{module}.py"), *arguments])
            importlib.import_module(f"bench.{module}").main()
    rows = [json.loads(line) for line in (out / f"{module}.jsonl").read_text().splitlines()]
    keys = ROW_KEYS | (set() if module in ON_ONE_DEVICE else {"tensor_parallel_size"})
    for row in rows:
        assert set(row) == keys | (MESH_KEYS if module == "mesh" else set())
        assert row["value"] > 0 or (row["value"] == 0 and module == "latency")  # counts of what shouldn't happen
        assert row["commit"] == "abc"
        assert row["command"] == " ".join(["python -m", f"bench.{module}", *options])
    return rows


def test_the_headline_workload_is_nano_vllms() -> None:
    made = workload.headline()
    assert (len(made.prompts), made.num_input_tokens, made.num_output_tokens) == (256, 142827, 133966)
    assert {min(map(len, made.prompts)) >= 100, max(map(len, made.prompts)) <= 1024} == {True}


@pytest.mark.parametrize(
    ("name", "decode_ms", "prefill_ms", "tokens_per_s"),
    [
        ("qwen3-0.6b", (0.318, 0.531, 2.240, 8.204), 21.1, 34984),
        ("qwen3-8b", (3.687, 3.961, 6.158, 15.042), 300.1, 12314),
    ],
)
def test_floors(name: str, decode_ms: tuple[float, ...], prefill_ms: float, tokens_per_s: float) -> None:
    """Against floors that were worked out elsewhere, by hand."""
    config = models.model_config(name)
    ours = [models.decode_floor_s(config, [1024 + 80] * batch) * 1e3 for batch in (1, 8, 64, 256)]
    assert ours == pytest.approx(decode_ms, abs=6e-4)
    assert models.prefill_floor_s(config, [1024] * 16) * 1e3 == pytest.approx(prefill_ms, abs=0.06)
    made = workload.headline()
    seconds = models.workload_floor_s(config, [len(p) for p in made.prompts], made.output_lens)
    assert made.num_output_tokens / seconds == pytest.approx(tokens_per_s, rel=1e-4)


def test_host_runs_without_a_device(tmp_path: Path) -> None:
    rows = run("host", tmp_path, "--running", "8", "--prompt-len", "20", "--steps", "20")
    assert [row["case"].rpartition(" ")[2] for row in rows] == ["schedule", "fill", "commit", "total"]  # type: ignore[attr-defined]


def test_simulate_runs_without_a_device(tmp_path: Path) -> None:
    options = [
        "--requests",
        "60",
        "--prompt-len",
        "100",
        "--output-len",
        "20",
        "--long-len",
        "3000",
        "--long-every",
        "0.2",
    ]
    options += ["--token-budgets", "256,512", "--num-blocks", "300", "--arrivals", "bursty"]
    command = [sys.executable, "-m", "bench.simulate", *options, "--out", str(tmp_path), "--commit", "abc"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    values = {row["case"]: row["value"] for row in rows}
    assert len(values) == len(rows) == 1 + 3 * 11
    longest = [values[f"{case}, longest gap"] for case in
               ("prefill_first budget 8192", "running_first budget 512", "running_first budget 256")]  # fmt: skip
    assert longest == sorted(longest, reverse=True)
    assert longest[0] > 2 * longest[1]


def test_ceilings_run_anywhere(tmp_path: Path) -> None:
    assert [row["unit"] for row in run("ceilings", tmp_path, "--repeats", "1")] == ["TB/s", "TB/s", "TFLOP/s"]


def test_kernels_run_anywhere(tmp_path: Path) -> None:
    rows = run("kernels", tmp_path)
    assert {str(row["case"]).partition(" ")[0] for row in rows} == {"ceiling,", "decode", "prefill", "mixed"}
    assert all(float(str(row["value"])) > 0 for row in rows)


SMALL = ["--config", "tiny", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-blocks", "64"]
SMALL += ["--block-size", "16", "--max-model-len", "128", "--decode-buckets", "4", "--token-buckets", "64"]


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])  # alone: simulate is, always
def test_throughput_runs(tmp_path: Path, alone: bool) -> None:
    options = ["--no-processors", "--num-prompts", "4", "--max-len", "12", "--repeats", "1"]
    rows = run("throughput", tmp_path, *SMALL, *options, alone=alone)
    assert [row["unit"] for row in rows] == ["output tok/s", "s", "s"]


def test_steps_run(tmp_path: Path) -> None:
    options = ["--batches", "1,4", "--prompt-len", "12", "--new-tokens", "16", "--prefill-prompts", "2"]
    rows = run("steps", tmp_path, *SMALL, "--no-processors", *options, "--repeats", "1")
    assert [row["case"] for row in rows] == [
        "tiny decode batch 1",
        "tiny decode batch 4",
        "tiny prefill 2x12",
    ]


def test_processors_run(tmp_path: Path) -> None:
    rows = run("processors", tmp_path, *SMALL, "--batch", "4", "--prompt-len", "12", "--new-tokens", "16")
    assert [row["case"] for row in rows][-3:] == [
        "tiny decode batch 4, 5 logprobs",
        "tiny update_params, fused",
        "tiny update_params, unfused",
    ]


def test_report_takes_the_last_row_of_a_case_and_quotes_peers(tmp_path: Path) -> None:
    row = dict.fromkeys(ROW_KEYS, "x") | {
        "bench": "steps",
        "case": "qwen3-0.6b decode batch 1",
        "unit": "ms",
    }
    rows = [row | {"device": "NVIDIA H200", "value": value, "floor": 0.318} for value in (1.5, 1.25)]
    rows.append(row | {"device": "another", "value": 3.0, "floor": None})
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    options = ["--results", str(tmp_path), "--readme", str(readme)]
    assert report.main([*options, "--check"]) == 1
    assert report.main(options) == 0
    assert report.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert "| qwen3-0.6b decode batch 1 | 1.25 | 2.29 | 2.25 | 0.318 | ms |" in text
    assert "| qwen3-0.6b decode batch 1 | 3 | ms |" in text
    assert "1.5" not in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        report.main(options)


def test_convert_runs(tmp_path: Path) -> None:
    rows = run("convert", tmp_path, "--config", "tiny", "--repeats", "1")
    assert [row["unit"] for row in rows] == ["GB"] + ["s", "GB/s"] * 10
    cases = [str(row["case"]) for row in rows]
    assert "tiny load ours cold" in cases and "tiny load safetensors warm rate" in cases


def test_convert_tries_another_pace(tmp_path: Path) -> None:
    options = ["--config", "tiny", "--repeats", "1", "--safetensors-only", "--states", "warm"]
    rows = run("convert", tmp_path, *options, "--parameters", "2", "--readers", "3", "--memory-mb", "64")
    assert [row["unit"] for row in rows] == ["s", "GB/s"] * 2
    assert rows[2]["case"] == "tiny 2 on their way in 64 MB, 3 readers, load safetensors warm"
