"""When the shards' own all-reduce can run, what is said where it can't, and that steps without it are the same."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxvllm import ModelConfig
from jaxvllm.config import EngineConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import resolve_backend
from jaxvllm.models import dense, layers
from jaxvllm.models.params import nest
from jaxvllm.models.registry import family, param_table
from jaxvllm.runtime import exchange
from jaxvllm.runtime.mesh import TP, make_mesh, spmd
from jaxvllm.runtime.state import STATE_SPECS, state_shapes
from jaxvllm.runtime.step import make_step
from tests.device.test_invariant_graph import KERNELS, equations

VOCAB = 332
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
    monkeypatch.setattr(exchange, "devices_reach_each_other", lambda devices: asked.append(devices) or True)
    mesh = hoppers(4)
    assert refuse(mesh) == "" and asked == [list(mesh.devices.flat)]


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
    devices = [SimpleNamespace(local_hardware_id=number) for number in (0, 1)]

    def can_access(result: Any, one: int, other: int) -> int:
        assert one != other
        ctypes.cast(result, ctypes.POINTER(ctypes.c_int))[0] = answers.get((one, other), 1)
        return 0

    driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access)
    assert exchange.devices_reach_each_other(devices, driver) is reach
    failing = SimpleNamespace(cuDeviceCanAccessPeer=lambda result, one, other: 101)
    assert not exchange.devices_reach_each_other(devices, failing)


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


def test_one_line_says_who_adds_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxvllm.runtime.exchange"):
        for shards in (1, 2):
            assert exchange.make_exchange(make_mesh(shards), MODEL, EngineConfig(dtype="bfloat16"), BACKENDS) is None
    assert [record.getMessage() for record in caplog.records] == [
        "all-reduce: XLA's, because the kernels need compute capability 9.0, but the platform is cpu"
    ]


def test_norms_that_add_up_the_shards_give_the_same_hidden_states() -> None:
    """The forward in the form of a fused step, two shards, against one shard in the plain form."""
    rng, tokens = np.random.default_rng(0), 6
    table = param_table(MODEL)
    flat = {path: rng.standard_normal(info.shape).astype("f4") * 0.1 for path, info in table.items()}
    ids, positions = jnp.asarray(rng.integers(0, VOCAB, tokens)), jnp.arange(tokens)

    def add_norm(x: Any, delta: Any, weights: Any, row: Any, turn: int) -> Any:
        turns.append(turn)
        return layers.add_rms_norm(x, layers.tp_sum(delta, TP), weights, row, eps=MODEL.rms_norm_eps)

    def write(i: Any, qkv: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any, carry: Any) -> Any:
        q, k, v = dense.split_qkv(qkv)
        q, k = (layers.apply_rope(layers.rms_norm(a, norm[i], MODEL.rms_norm_eps), cos, sin)
                for a, norm in ((q, q_norm), (k, k_norm)))  # fmt: skip
        return q, (k, v)

    def attend(i: Any, q: Any, k: Any, v: Any, carry: Any) -> Any:
        keys, values = carry if k is None else (k, v)
        groups = q.shape[1] // keys.shape[1]
        scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(keys, groups, 1))
        scores = jnp.where(jnp.tri(tokens, dtype=bool), scores * MODEL.head_dim**-0.5, -jnp.inf)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), jnp.repeat(values, groups, 1)), (keys, values)

    hidden = []
    for shards, fused in ((1, None), (2, dense.Fused(add_norm, write, sums=True))):
        mesh, turns = make_mesh(shards), []
        specs = nest({path: P(*info.axes) for path, info in param_table(MODEL, tp=shards).items()})
        heads = MODEL.num_key_value_heads // shards
        carry = (jnp.zeros((tokens, heads, MODEL.head_dim)),) * 2
        run = partial(family(MODEL).forward, config=MODEL, attend=attend, carry=carry, axis=TP, fused=fused)
        step = spmd(lambda params, ids, at, run=run: run(params, token_ids=ids, positions=at)[0], mesh,
                    (specs, P(), P()), P())  # fmt: skip
        hidden.append(jax.jit(step)(nest(flat), ids, positions))
    assert turns == [0, 1, 2]  # a layer is traced once
    np.testing.assert_allclose(hidden[0], hidden[1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("room", "fits"), [(None, False), (8, True), (2, False)])
def test_a_steps_sums_are_kernels_where_they_fit_and_all_reduces_elsewhere(room: int | None, fits: bool) -> None:
    """Read from the step's jaxpr, in which a layer is traced once: two sums in it, one in the last norm."""
    mesh, layout = make_mesh(2), PlanLayout(Bucket("decode", 4, 4), 1, 4, 8 * 64)
    engine = EngineConfig(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=4, tensor_parallel_size=2,
                          enable_processors=False).resolve(MODEL)  # fmt: skip
    made = None if room is None else exchange.allocate_exchange(mesh, 1024, room, 4)
    table = param_table(MODEL, tp=2)
    params = nest({path: jax.ShapeDtypeStruct(info.shape, jnp.float32) for path, info in table.items()})
    specs = nest({path: P(*info.axes) for path, info in table.items()})
    in_specs = specs, STATE_SPECS, None, P(), jax.tree.map(lambda _: P(TP), made)
    step = spmd(make_step(layout, MODEL, BACKENDS, TP), mesh, in_specs, (STATE_SPECS, None, P()))
    words = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    jaxpr = jax.make_jaxpr(step)(params, state_shapes(MODEL, engine, mesh, 8), None, words, made)
    found = list(equations(jaxpr.jaxpr))
    sums = sum(one.primitive.name.startswith("psum") for one in found)
    assert sums == (0 if fits else 3)
    names = [str(one.params) for one in found if one.primitive.name in KERNELS]
    assert sum("all_reduce_add_rms_norm" in name for name in names) == (3 if fits else 0)
    best = sum("best_of_shards" in name for name in names)
    assert best == (0 if room is None else 1)  # sequences always have room
    assert any(one.primitive.name in ("pmax", "pmin") for one in found) == (room is None)
