"""--verify: a truncated, bit-flipped or mixed-up file is named, and so is the parameter that it holds."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash

from jaxvllm.config import ModelConfig
from jaxvllm.convert import CheckpointError, convert_checkpoint, export_hf, load_params, verify_checkpoint
from jaxvllm.convert.__main__ import main
from jaxvllm.models.registry import param_table
from tests.convert.helpers import GOLDEN_DIR, edit_json, golden_copy, hf_tensors, keep, same_bits

NAME = "untied_sharded_index"
SOURCE = GOLDEN_DIR / NAME


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "ours"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxvllm.convert.build.PART_BYTES", 300_000)
        convert_checkpoint(SOURCE, folder)
    return folder


@pytest.fixture
def ours(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "ours")
    return tmp_path / "ours"


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder)
    return caught.value.problems


def test_a_whole_one_is_verified(ours: Path) -> None:
    assert verify_checkpoint(ours) == sum(i.size for i in param_table(ModelConfig.from_dir(ours)).values()) * 4


def test_checksums_are_xxh3_of_the_stored_bytes(ours: Path) -> None:
    """By hand: the bytes where the manifest says that they are, and the tensors of the source."""
    params = json.loads((ours / "manifest.json").read_text())["params"]
    tensors = hf_tensors(SOURCE)
    index = json.loads((SOURCE / "model.safetensors.index.json").read_text())["weight_map"]
    info = params["layers.1.down"]
    name = "model.layers.1.mlp.down_proj.weight"
    raw = (ours / info["file"]).read_bytes()[info["offset"] :][: tensors[name].nbytes]
    assert raw == tensors[name].tobytes()
    assert info["xxh3"] == xxhash.xxh3_128_hexdigest(raw)
    assert info["from"] == [index[name]]
    assert params["input_norm"]["from"] == sorted({index[f"model.layers.{i}.input_layernorm.weight"] for i in range(3)})


def test_orbax_alone_restores_it(ours: Path) -> None:
    restored = {}
    with ocp.PyTreeCheckpointer() as reader:
        for part in sorted((ours / "params").iterdir()):
            restored |= reader.restore(part)
    table = param_table(ModelConfig.from_dir(ours))
    loaded = load_params(ours, table, dtype="float32", put=keep)
    assert restored.keys() == table.keys()
    assert all(same_bits(np.asarray(restored[path]), loaded[path]) for path in table)


@pytest.mark.parametrize("seed", range(3))
def test_one_flipped_bit_anywhere_is_found(ours: Path, seed: int) -> None:
    """In each file in turn, at a random place; the file is named, and it alone."""
    chance = random.Random(seed)
    for file in files_of(ours):
        raw = bytearray(file.read_bytes())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        good = file.read_bytes()
        file.write_bytes(raw)
        name = file.relative_to(ours).as_posix()
        problems = problems_of(ours)
        assert name in "\n".join(problems)
        assert name == "config.json" or all(name in problem for problem in problems)
        file.write_bytes(good)
    verify_checkpoint(ours)


def test_a_truncated_or_absent_file_is_found(ours: Path) -> None:
    for file in files_of(ours):
        name = file.relative_to(ours).as_posix()
        good = file.read_bytes()
        file.write_bytes(good[: len(good) // 2])
        assert any(name in problem for problem in problems_of(ours))
        file.unlink()
        assert any(name in problem and "isn't there" in problem for problem in problems_of(ours))
        file.write_bytes(good)


def test_parts_of_another_model_of_the_same_shapes_are_found(ours: Path, tmp_path: Path) -> None:
    """Mixed-up files: loading notices, too, for orbax's index files differ."""
    other = golden_copy(NAME, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxvllm.convert.build.PART_BYTES", 300_000)
        convert_checkpoint(other, tmp_path / "other_ours")
    shutil.rmtree(ours / "params" / "part-00001")
    shutil.copytree(tmp_path / "other_ours" / "params" / "part-00001", ours / "params" / "part-00001")
    assert any("part-00001" in problem for problem in problems_of(ours))
    table = param_table(ModelConfig.from_dir(ours))
    with pytest.raises(CheckpointError, match="part-00001"):
        load_params(ours, table, dtype="float32", put=keep)


def test_swapped_files_are_found(ours: Path) -> None:
    data = [p for p in files_of(ours) if p.stat().st_size > 100_000]
    first, second = data[0].read_bytes(), data[1].read_bytes()
    data[0].write_bytes(second)
    data[1].write_bytes(first)
    text = "\n".join(problems_of(ours))
    assert all(p.name in text for p in data[:2])


def test_an_edited_config_is_told(ours: Path) -> None:
    edit_json(ours / "config.json", {"rms_norm_eps": 1e-5})
    (problem,) = problems_of(ours)
    assert problem.startswith("file config.json differs from its checksum")


def test_a_damaged_parameter_isn_t_exported(ours: Path, tmp_path: Path) -> None:
    file = max(files_of(ours), key=lambda p: p.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="differs from its checksum: it is damaged"):
        export_hf(ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_command_line(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("jaxvllm.convert.__main__._hush_orbax", lambda: None)
    assert main([str(SOURCE), str(tmp_path / "a"), "--verify", "--dtype", "bfloat16"]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf", "--verify"]) == 0
    assert main([str(ours), "--verify"]) == 0
    assert capsys.readouterr().out.count("verified") == 3
    file = max(files_of(ours), key=lambda p: p.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    assert main([str(ours), "--verify"]) == 1
    assert file.name in capsys.readouterr().err
    assert main([str(SOURCE), "--verify"]) == 1
    assert "has no checksums" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([str(SOURCE)])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--verify" in capsys.readouterr().out
