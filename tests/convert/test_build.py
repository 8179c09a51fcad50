"""Writing: nothing half-written, nothing overwritten unasked; damage is named; the command line."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jaxvllm.config import ModelConfig
from jaxvllm.convert import CheckpointError, convert_checkpoint, export_hf, load_params, verify_checkpoint, verify_table
from jaxvllm.convert.__main__ import main
from jaxvllm.models.registry import param_table
from tests.convert.helpers import (
    GOLDEN_DIR,
    edit_json,
    expected_params,
    golden_copy,
    hf_tensors,
    keep,
    look_without_pauses,
    same_bits,
)

NAME = "yarn_factor_4"
SOURCE = GOLDEN_DIR / NAME


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    convert_checkpoint(SOURCE, tmp_path / "ours")
    return tmp_path / "ours"


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        verify_table(folder, param_table(ModelConfig.from_dir(folder)))
    return caught.value.problems


def assert_whole(folder: Path) -> None:
    config = ModelConfig.from_dir(SOURCE)
    oracle = expected_params(hf_tensors(SOURCE), config, 1)
    loaded = load_params(folder, param_table(config), dtype="float32", put=keep)
    assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source = golden_copy(NAME, tmp_path / "src")
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "train.py"):
        (source / name).write_text(name)
    convert_checkpoint(source, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    expected = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "ours").iterdir()} == expected | {"manifest.json", "params"}
    assert {p.name for p in (tmp_path / "back").iterdir()} == expected | {"model.safetensors"}
    assert (tmp_path / "ours" / "chat_template.jinja").read_text() == "chat_template.jinja"


def test_an_existing_target_needs_force(ours: Path) -> None:
    (ours / "mine").write_text("")
    with pytest.raises(CheckpointError, match=r"is there already: .*--force"):
        convert_checkpoint(SOURCE, ours)
    assert (ours / "mine").exists()
    convert_checkpoint(SOURCE, ours, force=True)
    assert not (ours / "mine").exists()
    assert_whole(ours)
    assert [p.name for p in ours.parent.iterdir()] == ["ours"]


def test_an_empty_target_is_filled(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    convert_checkpoint(SOURCE, tmp_path / "ours")
    assert_whole(tmp_path / "ours")


def test_force_never_replaces_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        convert_checkpoint(SOURCE, tmp_path / "home", force=True)
    with pytest.raises(CheckpointError, match="isn't a folder"):
        convert_checkpoint(SOURCE, tmp_path / "home" / "letter", force=True)
    assert (tmp_path / "home" / "letter").read_text() == "dear"


def test_the_source_is_never_the_target(tmp_path: Path) -> None:
    source = golden_copy(NAME, tmp_path / "src")
    for target in (source, tmp_path / "src" / ".." / "src", tmp_path):
        with pytest.raises(CheckpointError, match="is, or holds, the source"):
            convert_checkpoint(source, target, force=True)
    assert_whole(source)


def test_a_failing_write_leaves_nothing_and_keeps_the_old(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    look_without_pauses(monkeypatch)
    monkeypatch.setattr("jaxvllm.convert.parts.save_part", full)
    for target, force in ((tmp_path / "new", False), (ours, True)):
        with pytest.raises(
            CheckpointError, match=r"can't be written: No space left on device: free some space.*; nothing is left"
        ):
            convert_checkpoint(SOURCE, target, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]
    assert_whole(ours)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    look_without_pauses(monkeypatch)
    monkeypatch.setattr("jaxvllm.convert.build.copy_beside", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(SOURCE, tmp_path / "ours")
    assert list(tmp_path.iterdir()) == []


def test_formats_aren_t_confused(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="in our format already"):
        convert_checkpoint(ours, tmp_path / "x")
    with pytest.raises(CheckpointError, match="Hugging Face folder already"):
        export_hf(SOURCE, tmp_path / "x")


def test_damaged_files_of_ours_are_named(ours: Path) -> None:
    files = sorted(p for p in (ours / "params").rglob("*") if p.is_file())
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    gone = next(p for p in files if p.name == "_METADATA")
    gone.unlink()
    problems = problems_of(ours)
    assert len(problems) == 2
    assert any(largest.name in p and "damaged" in p for p in problems)
    assert any("_METADATA isn't there" in p for p in problems)


def test_garbled_data_is_an_error_of_ours(ours: Path) -> None:
    for file in (ours / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x55" * file.stat().st_size)  # sizes agree
    problems = problems_of(ours)
    assert all(p.startswith("file params/part-00000/") and "differs from its checksum" in p for p in problems)


def test_another_config_is_listed(ours: Path) -> None:
    edit_json(ours / "config.json", {"vocab_size": 400, "tie_word_embeddings": False, "num_hidden_layers": 2,
                                     "layer_types": None})  # fmt: skip
    problems = problems_of(ours)
    assert "missing parameter head" in problems
    assert "mis-shaped parameter embed: [331, 64], expected [400, 64]" in problems
    assert "mis-shaped parameter q_norm: [3, 32], expected [2, 32]" in problems
    assert sum(p.startswith("unused parameter layers.2.") for p in problems) == 4


def test_a_table_of_another_model_is_refused(ours: Path) -> None:
    other = param_table(ModelConfig.from_dir(GOLDEN_DIR / "mqa_one_kv_head_odd_vocab"))
    with pytest.raises(CheckpointError, match="other parameters than asked for: head"):
        verify_table(ours, other)
    with pytest.raises(CheckpointError, match="build embed from different tensors"):
        verify_table(ours, {p: i for p, i in other.items() if p != "head"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "isn't one of ours"),
        ({"format_version": 1}, r"format_version=1 isn't readable here, 2 is"),
        ({"params": []}, "has no params"),
        (
            {"params": {"embed": {"shape": [1], "dtype": "int8", "part": "part-00000"}}},
            "parameter 'embed' needs",
        ),
        (
            {"params": {"embed": {"shape": [1], "dtype": "float32", "part": "../x"}}},
            "parameter 'embed' needs",
        ),
        ({"params": {"embed": {"shape": [-1], "dtype": "float32", "part": "x"}}}, "parameter 'embed' needs"),
        ({"files": None}, "has no files"),
        ({"files": {"../../x": 1}}, "outside of the folder"),
    ],
)
def test_bad_manifests_are_named(ours: Path, fields: dict[str, object], message: str) -> None:
    edit_json(ours / "manifest.json", fields)
    with pytest.raises(CheckpointError, match=message):
        verify_table(ours, param_table(ModelConfig.from_dir(ours)))


def test_a_manifest_that_differs_from_the_data(ours: Path) -> None:
    manifest = json.loads((ours / "manifest.json").read_text())
    manifest["params"]["embed"]["dtype"] = "bfloat16"
    (ours / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"parameter embed in .* differs from its checksum"):
        verify_checkpoint(ours)  # half of its bytes
    (ours / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read as JSON"):
        verify_table(ours, {})


def test_the_error_survives_pickling() -> None:
    error = CheckpointError("x", ["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "x has 2 problems:\n  - one\n  - two"
    assert again.problems == ("one", "two")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxvllm.convert", str(SOURCE), str(tmp_path / "ours")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "187,712 parameters" in done.stdout
    assert_whole(tmp_path / "ours")
    assert main([str(SOURCE), str(tmp_path / "ours")]) == 1
    assert "--force" in capsys.readouterr().err
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--dtype", "bfloat16"]) == 0
    assert ModelConfig.from_dir(tmp_path / "back").dtype == "bfloat16"


def test_importing_the_package_imports_neither_jax_nor_orbax() -> None:
    code = "import sys, jaxvllm.convert.errors; print({'jax', 'orbax', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
