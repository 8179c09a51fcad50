"""CASES 20: the index decides; every problem is listed in one error; nothing half-loaded runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm.config import ModelConfig
from jaxvllm.convert import CheckpointError, convert_checkpoint, detect, load_params, verify_table
from jaxvllm.models.registry import param_table
from tests.convert.helpers import (
    BF16,
    EMBED,
    HEAD,
    edit_json,
    expected_params,
    golden_copy,
    hf_tensors,
    keep,
    same_bits,
)

TIED, UNTIED, SHARDED = "tied_head_dim_differs", "mqa_one_kv_head_odd_vocab", "untied_sharded_index"
INDEX = "model.safetensors.index.json"


def problems_of(folder: Path) -> tuple[str, ...]:
    """What loading says; it must say it before the first parameter is placed."""
    placed: list[str] = []
    table = param_table(ModelConfig.from_dir(folder))
    with pytest.raises(CheckpointError) as caught:
        load_params(folder, table, dtype="float32", put=lambda info, array: placed.append(info.path))
    assert placed == []
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    with pytest.raises(CheckpointError) as again:
        verify_table(folder, table)
    assert again.value.problems == caught.value.problems
    return caught.value.problems


def assert_loads(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    config = ModelConfig.from_dir(folder)
    oracle = expected_params(tensors, config, 1)
    loaded = load_params(folder, param_table(config), dtype="float32", put=keep)
    assert loaded.keys() == oracle.keys()
    assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


def rewrite(folder: Path, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """model.safetensors with tensors replaced, added or (None) removed; dots are written as __."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_tied_model_without_head(tmp_path: Path) -> None:
    folder = golden_copy(TIED, tmp_path / "m")
    assert HEAD not in hf_tensors(folder)
    assert_loads(folder, hf_tensors(folder))


def test_tied_model_with_an_equal_head(tmp_path: Path) -> None:
    folder = golden_copy(TIED, tmp_path / "m")
    tensors = hf_tensors(folder)
    rewrite(folder, lm_head__weight=tensors[EMBED])
    assert_loads(folder, tensors)
    convert_checkpoint(folder, tmp_path / "ours")
    assert_loads(tmp_path / "ours", tensors)


def test_tied_model_with_another_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxvllm.convert.hf._COMPARE_ELEMENTS", 1000)  # many pieces, the difference in a late one
    folder = golden_copy(TIED, tmp_path / "m")
    head = hf_tensors(folder)[EMBED].copy()
    head[300, 63] = np.nextafter(head[300, 63], np.float32(np.inf))
    rewrite(folder, lm_head__weight=head)
    (problem,) = problems_of(folder)
    assert HEAD in problem
    assert EMBED in problem
    assert "row 300" in problem
    assert "tie_word_embeddings" in problem
    edit_json(folder / "config.json", {"tie_word_embeddings": False})  # the way out that it names
    assert_loads(folder, hf_tensors(folder))


def test_tied_model_whose_head_has_another_shape_or_dtype(tmp_path: Path) -> None:
    folder = golden_copy(TIED, tmp_path / "m")
    embed = hf_tensors(folder)[EMBED]
    rewrite(folder, lm_head__weight=embed[:-1])
    (problem,) = problems_of(folder)
    assert HEAD in problem
    assert "[330, 64]" in problem
    assert "differ in shape" in problem
    rewrite(folder, lm_head__weight=embed.astype(np.float64))
    assert problems_of(folder) == (f"dtype F64 of {HEAD} isn't supported; supported are BF16, F16, F32",)
    rounded = embed.astype(BF16).astype(np.float16).astype(np.float32)  # representable in both
    tensors = rewrite(folder, lm_head__weight=rounded.astype(np.float16), model__embed_tokens__weight=rounded)
    assert_loads(folder, tensors)


def test_untied_flag_but_no_head(tmp_path: Path) -> None:
    folder = golden_copy(UNTIED, tmp_path / "m")
    rewrite(folder, lm_head__weight=None)
    (problem,) = problems_of(folder)
    assert problem.startswith(f"missing tensor {HEAD}")
    assert "tie_word_embeddings=false" in problem


def test_index_naming_an_absent_shard(tmp_path: Path) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    (folder / "model-00003-of-00008.safetensors").unlink()
    (folder / "model-00005-of-00008.safetensors").unlink()
    first, second = problems_of(folder)
    assert "'model-00003-of-00008.safetensors', which isn't there" in first
    assert "'model-00005-of-00008.safetensors', which isn't there" in second


def test_stray_files_beside_an_index_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    tensors = hf_tensors(folder)
    save_file({EMBED: np.zeros((3, 3), np.float32)}, folder / "model.safetensors")
    (folder / "adapter.safetensors").write_bytes(b"not even a header")
    with caplog.at_level(logging.WARNING):
        assert_loads(folder, tensors)
    assert {"adapter.safetensors", "model.safetensors"} <= set(caplog.text.split())


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -1])
def test_truncated_file(tmp_path: Path, keep_bytes: int) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    file = folder / "model-00002-of-00008.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{file.name}: is truncated: ")
    with pytest.raises(CheckpointError, match="is truncated"):
        convert_checkpoint(folder, tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("name", ["../m2/model.safetensors", "/etc/passwd", "a/../../x", "..\\x", "x\0y", ""])
def test_index_leaving_the_folder(tmp_path: Path, name: str) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    golden_copy(UNTIED, tmp_path / "m2")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, {"weight_map": weight_map | {EMBED: name}})
    (problem,) = problems_of(folder)
    assert "outside of the folder" in problem
    assert repr(name) in problem


BROKEN = [
    "{",
    "[]",
    "{}",
    '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a":"b","a":"c"}}',
    "[" * 100_000,
    "\udcff",
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_index(tmp_path: Path, text: str) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    (problem,) = problems_of(folder)
    assert problem.startswith(INDEX)


def test_index_that_misplaces_a_tensor(tmp_path: Path) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    elsewhere = next(file for file in weight_map.values() if file != weight_map[EMBED])
    edit_json(folder / INDEX, {"weight_map": weight_map | {EMBED: elsewhere}})
    (problem,) = problems_of(folder)
    assert problem == f"missing tensor {EMBED}: {INDEX} places it in {elsewhere}, which doesn't hold it"


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    folder = golden_copy(UNTIED, tmp_path / "m")
    q = "model.layers.0.self_attn.q_proj.weight"
    rewrite(
        folder,
        model__layers__2__mlp__up_proj__weight=None,
        model__layers__1__self_attn__q_proj__bias=np.zeros(128, np.float32),
        model__layers__0__self_attn__q_proj__weight=np.zeros((64, 128), np.float32),
        model__norm__weight=np.zeros(64, np.int8),
        model__layers__3__mlp__up_proj__weight=np.zeros((1, 1), np.float32),
        model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(16, np.float32),  # ignored
    )
    assert set(problems_of(folder)) == {
        "missing tensor model.layers.2.mlp.up_proj.weight",
        "unused tensor model.layers.1.self_attn.q_proj.bias [128]: config.json's model has no place for it",
        "unused tensor model.layers.3.mlp.up_proj.weight [1, 1]: config.json's model has no place for it",
        f"mis-shaped tensor {q}: [64, 128], expected [128, 64]",
        "dtype I8 of model.norm.weight isn't supported; supported are BF16, F16, F32",
    }


def test_file_and_tensor_problems_together(tmp_path: Path) -> None:
    folder = golden_copy(SHARDED, tmp_path / "m", config={"vocab_size": 400})
    (folder / "model-00004-of-00008.safetensors").write_bytes(b"")
    problems = problems_of(folder)
    assert len(problems) == 3
    assert any("is truncated" in p for p in problems)
    assert sum(f"mis-shaped tensor {name}: [331, 64], expected [400, 64]" in problems for name in (EMBED, HEAD)) == 2


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"pytorch_model.bin": b"\x80"}, r"only pytorch_model.bin: a pickle.*safe_serialization=True"),
        ({"model-00001-of-00002.safetensors": b""}, r"but model-00001-of-00002.safetensors: add their index"),
        ({}, r"holds neither model.safetensors nor model.safetensors.index.json$"),
    ],
)
def test_a_folder_without_usable_weights(tmp_path: Path, files: dict[str, bytes], hint: str) -> None:
    folder = golden_copy(TIED, tmp_path / "m")
    table = param_table(ModelConfig.from_dir(folder))
    (folder / "model.safetensors").unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for attempt in (lambda: detect(folder), lambda: verify_table(folder, table),
                    lambda: convert_checkpoint(folder, tmp_path / "ours")):  # fmt: skip
        with pytest.raises(CheckpointError, match=hint):
            attempt()
    with pytest.raises(CheckpointError, match="is not a directory"):
        detect(folder / "config.json")


def test_a_hub_cache_of_links_loads(tmp_path: Path) -> None:
    folder = golden_copy(TIED, tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert_loads(folder, load_file(tmp_path / "blob"))
