"""When the shards' own all-reduce can run, what is said where it can't, and that steps without it are the same."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import ModelConfig, SamplingParams
from jaxvllm.config import EngineConfig
from jaxvllm.kernels import resolve_backend
from jaxvllm.runtime import exchange
from jaxvllm.runtime.mesh import make_mesh
from tests.device.support import VOCAB, make_engine

MODEL = ModelConfig(vocab_size=VOCAB, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=64, dtype="float32",
                    max_position_embeddings=128)  # fmt: skip
BACKENDS = resolve_backend("auto", platform="gpu", head_dim=64, block_size=64, dtype="bfloat16",
                           compute_capability="9.0")  # fmt: skip


def hoppers(count: int = 2, **changes: Any) -> Any:
    """A mesh of that many H200s, as far as `refusal` looks."""
    facts = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": "9.0",
             "process_index": 0} | changes  # fmt: skip
    devices = [SimpleNamespace(local_hardware_id=i, **facts) for i in range(count)]
    return SimpleNamespace(size=count, devices=np.array(devices, dtype=object))


def refuse(mesh: Any, model: ModelConfig = MODEL, backends: Any = BACKENDS, **changes: Any) -> str:
    return exchange.refusal(mesh, model, EngineConfig(dtype="bfloat16", **changes), backends)


def test_hoppers_that_reach_each_other_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(exchange, "devices_reach_each_other", lambda ordinals: asked.append(ordinals) or True)
    assert refuse(hoppers(4)) == "" and asked == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("mesh", "changes", "reason"),
    [
        (hoppers(compute_capability="8.0", device_kind="NVIDIA A100"), {}, "9.0, but NVIDIA A100 has 8.0"),
        (hoppers(platform="cpu", compute_capability=""), {}, "platform is cpu"),
        (hoppers(process_index=1), {}, "spans processes"),
        (hoppers(), {"disable_custom_all_reduce": True}, "disable_custom_all_reduce=True"),
        (hoppers(), {"model": replace(MODEL, hidden_size=640)}, "hidden_size=640"),
        (hoppers(), {"backends": resolve_backend("xla", platform="gpu", head_dim=64, block_size=64, dtype="bfloat16"),
                     "attention_backend": "xla"}, "attention_backend='xla'"),
        (hoppers(), {}, "NVLink or peer access"),  # there is no driver here
    ],
)  # fmt: skip
def test_every_other_mesh_is_refused_with_the_reason(mesh: Any, changes: dict[str, Any], reason: str) -> None:
    assert reason in refuse(mesh, **changes)


@pytest.mark.parametrize(("answers", "reach"), [({}, True), ({(0, 1): 0}, False), ({(1, 0): 0}, False)])
def test_every_pair_of_devices_is_asked_for(answers: dict[tuple[int, int], int], reach: bool) -> None:
    def can_access(result: Any, one: int, other: int) -> int:
        assert one != other
        ctypes.cast(result, ctypes.POINTER(ctypes.c_int))[0] = answers.get((one, other), 1)
        return 0

    driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access)
    assert exchange.devices_reach_each_other([0, 1], driver) is reach
    failing = SimpleNamespace(cuDeviceCanAccessPeer=lambda result, one, other: 101)
    assert not exchange.devices_reach_each_other([0, 1], failing)


def test_addresses_travel_as_two_words() -> None:
    table = exchange.address_table([0x7F12_8000_0000, 0x7F99_FFFF_FF00]).view(np.uint32)
    assert table.shape == (2, 7) and table[:, 0].tolist() == [0, 1]
    both = (table[:, 1::2].astype(np.uint64) | table[:, 2::2].astype(np.uint64) << 32).tolist()
    assert both == [[0x7F12_8000_0000, 0x7F12_8000_0000, 0x7F99_FFFF_FF00],
                    [0x7F99_FFFF_FF00, 0x7F12_8000_0000, 0x7F99_FFFF_FF00]]  # fmt: skip


def test_buffers_are_empty_and_on_every_device() -> None:
    mesh = make_mesh(4)
    made = exchange.allocate_exchange(mesh, row_bytes=256, capacity=3, max_seqs=5)
    assert {shard.device for shard in made.buffers.addressable_shards} == set(mesh.devices.flat)
    assert np.unique(np.asarray(made.buffers)).tolist() == [0x80008000]
    addresses = np.asarray(made.peers)[:, 1:3].view(np.uint32).astype(np.uint64)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in made.buffers.addressable_shards]
    assert sorted((addresses[:, 0] | addresses[:, 1] << np.uint64(32)).tolist()) == sorted(pointers)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_fused_steps_of_two_shards_give_the_same_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """The step's form in which the norms add up the shards' parts; one line says by whom."""
    prompts, tokens = [[5, 9, 2, 7, 7, 1, 30, 4, 8, 8, 3], [11, 3]], []
    params = [SamplingParams(temperature=heat, seed=3, max_tokens=5, ignore_eos=True) for heat in (0.0, 0.9)]
    for shards, backend in ((1, "xla"), (2, "triton_interpret")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "jaxvllm.runtime.exchange"), make_engine(
            MODEL, attention_backend=backend, num_blocks=8, block_size=16, max_num_seqs=2,
            max_num_batched_tokens=16, decode_buckets=(2,), token_buckets=(16,), warmup=False,
            enable_processors=False, tensor_parallel_size=shards,
        ) as engine:  # fmt: skip
            lines = [record.getMessage() for record in caplog.records if "all-reduce" in record.getMessage()]
            assert [("XLA's" in line, "platform is cpu" in line) for line in lines] == [(True, True)] * (shards - 1)
            tokens.append([output.token_ids for output in engine.generate(prompts, params, use_tqdm=False)])
            assert len(jax.tree.leaves(engine._executor.params)[0].devices()) == shards
    assert tokens[0] == tokens[1]
