"""Both formats load, bit for bit and identically, at every tp; casts; the round trip."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
from safetensors.numpy import save_file

from jaxvllm.config import ModelConfig
from jaxvllm.convert import (
    convert_checkpoint,
    detect,
    export_hf,
    load_params,
    load_shards,
    open_checkpoint,
    verify_table,
)
from jaxvllm.convert.load import Parts
from jaxvllm.convert.pace import Pace
from jaxvllm.models.params import ParamInfo
from jaxvllm.models.registry import param_table
from tests.convert import helpers
from tests.convert.helpers import (
    BF16,
    GOLDEN,
    GOLDEN_DIR,
    cast_by_jax,
    expected_params,
    golden_copy,
    hf_tensors,
    keep,
    same_bits,
)

CONFIGS = {name: ModelConfig.from_dir(GOLDEN_DIR / name) for name in GOLDEN}


def splits(config: ModelConfig, tp: int) -> bool:
    """6 query heads on 2 key/value heads can't be split over 4 shards, nor 3 on 3 over 2."""
    kv_heads = config.num_key_value_heads
    return kv_heads % tp == 0 or (tp % kv_heads == 0 and config.num_attention_heads % tp == 0)


TP_CASES = [(name, tp) for name, config in CONFIGS.items() for tp in (1, 2, 4) if splits(config, tp)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every golden checkpoint in our format, under its name."""
    folder = tmp_path_factory.mktemp("converted")
    for name in GOLDEN:
        convert_checkpoint(GOLDEN_DIR / name, folder / name)
    return folder


@pytest.mark.parametrize(("name", "tp"), TP_CASES)
def test_both_formats_give_the_layout_bit_for_bit(converted: Path, name: str, tp: int) -> None:
    config = ModelConfig.from_dir(GOLDEN_DIR / name)
    table = param_table(config, tp=tp)
    oracle = expected_params(hf_tensors(GOLDEN_DIR / name), config, tp)
    for folder in (GOLDEN_DIR / name, converted / name):
        loaded = load_params(folder, table, dtype="float32", put=keep)
        assert list(loaded) == list(table)
        assert loaded.keys() == oracle.keys()
        wrong = [path for path in oracle if not same_bits(np.asarray(loaded[path]), oracle[path])]
        assert wrong == [], folder


@pytest.mark.parametrize("name", GOLDEN)
def test_every_hf_tensor_is_found_back(converted: Path, name: str) -> None:
    tensors = hf_tensors(GOLDEN_DIR / name)
    for tp in (1, 2):
        if (name, tp) not in TP_CASES:
            continue
        table = param_table(ModelConfig.from_dir(GOLDEN_DIR / name), tp=tp)
        loaded = load_params(converted / name, table, dtype="float32", put=keep)
        back = {s.name: s.take(loaded[info.path]) for info in table.values() for s in info.sources}
        assert back.keys() == tensors.keys()
        assert [n for n in tensors if not same_bits(back[n], tensors[n])] == []


@pytest.mark.parametrize("name", GOLDEN)
def test_our_folder_describes_the_same_model(converted: Path, name: str) -> None:
    assert detect(GOLDEN_DIR / name) == "hf"
    assert detect(converted / name) == "jaxvllm"
    assert ModelConfig.from_dir(converted / name) == ModelConfig.from_dir(GOLDEN_DIR / name)
    verify_table(converted / name, param_table(ModelConfig.from_dir(GOLDEN_DIR / name)))
    manifest = json.loads((converted / name / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert manifest["source"] == {f.name: f.stat().st_size for f in (GOLDEN_DIR / name).glob("*.safetensors")}
    assert manifest["params"]["embed"]["shape"] == list(hf_tensors(GOLDEN_DIR / name)[helpers.EMBED].shape)


@pytest.mark.parametrize("name", GOLDEN)
def test_round_trip_float32(converted: Path, tmp_path: Path, name: str) -> None:
    export_hf(converted / name, tmp_path / "back")
    back, tensors = hf_tensors(tmp_path / "back"), hf_tensors(GOLDEN_DIR / name)
    assert back.keys() == tensors.keys()
    assert [n for n in tensors if not same_bits(back[n], tensors[n])] == []
    assert ModelConfig.from_dir(tmp_path / "back") == ModelConfig.from_dir(GOLDEN_DIR / name)


def test_round_trip_bfloat16_through_another_reader(tmp_path: Path) -> None:
    rounded = cast_by_jax(hf_tensors(GOLDEN_DIR / GOLDEN[0]), "bfloat16")
    tensors = {n: jnp.asarray(t) for n, t in rounded.items()}
    source = golden_copy(GOLDEN[0], tmp_path / "bf16", config={"dtype": "bfloat16"})
    safetensors.flax.save_file(tensors, source / "model.safetensors")
    table = param_table(ModelConfig.from_dir(source))
    direct = load_params(source, table, dtype=jnp.bfloat16, put=keep)
    convert_checkpoint(source, tmp_path / "ours")
    ours = load_params(tmp_path / "ours", table, dtype="bfloat16", put=keep)
    assert {a.dtype for a in direct.values()} == {BF16}
    assert all(same_bits(direct[path], ours[path]) for path in table)
    export_hf(tmp_path / "ours", tmp_path / "back")
    back = safetensors.flax.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same_bits(np.asarray(back[n]), np.asarray(tensors[n])) for n in tensors)


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_casts_are_the_same_from_both_formats(tmp_path: Path, stored: str, wanted: str) -> None:
    name = "mqa_one_kv_head_odd_vocab"
    tensors = {n: t.astype(stored) for n, t in hf_tensors(GOLDEN_DIR / name).items()}
    source = golden_copy(name, tmp_path / "src", config={"dtype": stored})
    save_file(tensors, source / "model.safetensors")
    config = ModelConfig.from_dir(source)
    convert_checkpoint(source, tmp_path / "ours")
    rounded = cast_by_jax(tensors, wanted)
    oracle = expected_params(rounded, config, 4)
    for folder in (source, tmp_path / "ours"):
        loaded = load_params(folder, param_table(config, tp=4), dtype=wanted, put=keep)
        assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


def test_conversion_with_a_dtype_casts_and_says_so_in_config(tmp_path: Path) -> None:
    source = golden_copy(GOLDEN[0], tmp_path / "src", config={"torch_dtype": "float32"})
    convert_checkpoint(source, tmp_path / "ours", dtype="bfloat16")
    config = ModelConfig.from_dir(tmp_path / "ours")
    assert config.dtype == "bfloat16"
    with open_checkpoint(tmp_path / "ours") as reader:
        embed = reader.read(param_table(config)["embed"])
    assert same_bits(embed, hf_tensors(GOLDEN_DIR / GOLDEN[0])[helpers.EMBED].astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match=r"dtype='float16' can't be written; choose one of bfloat16, float32"):
        convert_checkpoint(source, tmp_path / "half", dtype="float16")


def test_mixed_dtypes_are_stored_in_the_widest_of_a_parameter(tmp_path: Path) -> None:
    name = "tied_head_dim_differs"
    tensors = hf_tensors(GOLDEN_DIR / name)
    narrow = {n: t.astype(BF16) if "k_proj" in n or "embed" in n else t for n, t in tensors.items()}
    source = golden_copy(name, tmp_path / "src")
    safetensors.flax.save_file({n: jnp.asarray(t) for n, t in narrow.items()}, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "ours")
    config = ModelConfig.from_dir(source)
    exact = {n: t.astype(np.float32) for n, t in narrow.items()}
    oracle = expected_params(exact, config, 1)
    loaded = load_params(tmp_path / "ours", param_table(config), dtype="float32", put=keep)
    assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


@pytest.mark.parametrize("form", ["hf", "ours"])
def test_memory_is_used_again_only_when_it_may(converted: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """With keeps=False many parameters share few buffers; what place copied out of them is right at any tp."""
    monkeypatch.setattr("jaxvllm.convert.memory.SMALL_BYTES", 1000)
    name = "mqa_one_kv_head_odd_vocab"
    folder = (GOLDEN_DIR if form == "hf" else converted) / name
    config = ModelConfig.from_dir(folder)
    for tp in (1, 4):
        oracle = expected_params(hf_tensors(GOLDEN_DIR / name), config, tp)
        addresses = []

        def place(info: ParamInfo, read: Parts, tp: int = tp, addresses: list = addresses) -> np.ndarray:
            axis = info.axes.index("tp") if "tp" in info.axes else 0
            ends = [n // (tp if i == axis and "tp" in info.axes else 1) for i, n in enumerate(info.shape)]
            parts = []
            for shard in range(info.shape[axis] // ends[axis]):
                index = tuple(
                    slice(shard * n, (shard + 1) * n) if i == axis else slice(None) for i, n in enumerate(ends)
                )
                part = read(index)
                assert part.flags.c_contiguous
                addresses.append(part.ctypes.data)
                parts.append(part.copy())
            return np.concatenate(parts, axis)

        loaded = load_shards(folder, param_table(config, tp=tp), dtype="float32", place=place, keeps=False)
        assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []
        assert len(set(addresses)) < len(addresses)


def test_put_may_shard(converted: Path) -> None:
    name = "mqa_one_kv_head_odd_vocab"
    config = ModelConfig.from_dir(GOLDEN_DIR / name)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("tp",))

    def put(info: ParamInfo, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*info.axes)))

    loaded = load_params(converted / name, param_table(config, tp=4), dtype="float32", put=put)
    k = hf_tensors(GOLDEN_DIR / name)["model.layers.1.self_attn.k_proj.weight"]
    shards = loaded["layers.1.qkv"].addressable_shards
    assert len(shards) == 4
    for shard in shards:  # one query head each, and its own copy of the one key head
        assert shard.data.shape == (1, 3, config.head_dim, config.hidden_size)
        assert same_bits(np.asarray(shard.data)[0, 1], k)


def test_large_models_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxvllm.convert.build.PART_BYTES", 300_000)
    name = "untied_sharded_index"
    convert_checkpoint(GOLDEN_DIR / name, tmp_path / "ours")
    assert sorted(p.name for p in (tmp_path / "ours" / "params").iterdir()) == [
        "part-00000",
        "part-00001",
        "part-00002",
    ]
    config = ModelConfig.from_dir(GOLDEN_DIR / name)
    oracle = expected_params(hf_tensors(GOLDEN_DIR / name), config, 1)
    loaded = load_params(tmp_path / "ours", param_table(config), dtype="float32", put=keep)
    assert [p for p in oracle if not same_bits(loaded[p], oracle[p])] == []


def test_loading_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    fields = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 1024}
    source = golden_copy("tied_head_dim_differs", tmp_path / "src",
                         config=fields | {"layer_types": None, "head_dim": 64})  # fmt: skip
    table = param_table(ModelConfig.from_dir(source))
    save_file({s.name: np.full(s.shape, 0.5, np.float32) for i in table.values() for s in i.sources},
              source / "model.safetensors")  # fmt: skip
    largest = max(info.size for info in table.values()) * 4
    assert sum(info.size for info in table.values()) * 4 > 12 * largest
    tracemalloc.start()
    load_params(source, table, dtype="float32", put=lambda info, array: None, pace=Pace(memory_bytes=0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * largest  # the parameter, and two of its tensors
