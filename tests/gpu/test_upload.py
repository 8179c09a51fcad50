"""The CUDA driver's copies bring the same bytes as jax's own way (make test-gpu)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.models import model_config
from jaxvllm import ModelConfig
from jaxvllm.convert import convert_checkpoint, load_shards
from jaxvllm.convert.safetensors_io import write_file
from jaxvllm.convert.tables import canonical_table, host_dtype
from jaxvllm.models.registry import param_table
from jaxvllm.runtime.mesh import make_mesh
from jaxvllm.runtime.upload import open_upload
from jaxvllm.runtime.weights import make_place

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """3 layers of Qwen3-8B's widths, 1.2 GB in which no two places are alike, in both formats."""
    config = replace(model_config("qwen3-8b"), num_hidden_layers=3, vocab_size=4099, tie_word_embeddings=True)
    folder, rng = tmp_path_factory.mktemp("upload") / "hf", np.random.default_rng(0)
    folder.mkdir()
    fields = {k: v for k, v in asdict(config).items() if k not in ("rope", "eos_token_ids", "architecture")}
    fields |= {"architectures": [config.architecture], "rope_theta": config.rope.theta}
    (folder / "config.json").write_text(json.dumps(fields))
    dtype = host_dtype(config.dtype)
    shapes = {s.name: (dtype, s.shape) for info in canonical_table(config).values() for s in info.sources}
    made = (
        (name, rng.integers(0, 1 << 16, math.prod(shape), np.uint16).view(dtype).reshape(shape))
        for name, (_, shape) in shapes.items()
    )
    write_file(folder / "model.safetensors", shapes, made)
    convert_checkpoint(folder, folder.parent / "ours")
    return [folder, folder.parent / "ours"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("which", [0, 1], ids=["safetensors", "ours"])
def test_the_same_bytes_as_by_device_put_cut(folders: list[Path], which: int, tp: int) -> None:
    if len(jax.devices()) < tp:
        pytest.skip(f"needs {tp} GPUs, has {len(jax.devices())}")
    folder, mesh = folders[which], make_mesh(tp)
    table = param_table(ModelConfig.from_dir(folder), tp=tp)

    for dtype in ("bfloat16", "float32"):
        expected = load_shards(folder, table, dtype=dtype, place=make_place(mesh), keeps=False)
        upload = open_upload(mesh.local_devices)
        assert upload is not None
        with upload:
            placed = load_shards(folder, table, dtype=dtype, place=make_place(mesh, upload), keeps=False)
        for path, value in expected.items():
            bits = jnp.uint16 if dtype == "bfloat16" else jnp.uint32
            one, other = (jax.lax.bitcast_convert_type(x, bits) for x in (value, placed[path]))
            assert bool(jnp.array_equal(one, other)), path
