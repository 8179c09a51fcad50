"""How the pool gets its size: what is kept counts to the byte, and a wrong estimate of a step is found and mended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxvllm.config import ConfigError, EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket, BucketTable
from jaxvllm.runtime.executor import Executor
from jaxvllm.runtime.memory import choose_num_blocks, processing_bytes, transient_estimate
from jaxvllm.runtime.mesh import make_mesh
from jaxvllm.runtime.processors import processor_bytes, processor_shapes
from jaxvllm.runtime.state import allocate_state, logits_shape

GB = 10**9
MODEL = ModelConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096)  # fmt: skip
BUCKETS = BucketTable((1, 8), (8, 64), 8)
WEIGHTS = 2 * GB
BLOCK = 2 * 2 * 2 * 64 * 64 * 2  # layers, k and v, heads, tokens, elements, bytes


@pytest.mark.parametrize("shards", [1, 4])
def test_what_processors_keep_on_each_device(shards: int) -> None:
    mesh = make_mesh(shards)
    state = allocate_state(processor_shapes(mesh, 3, 331))
    logits = allocate_state({n: logits_shape(331, mesh, n) for n in (1, 8)})
    for device in mesh.devices.flat:
        held = [
            [shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
             if shard.device == device]
            for tree in (state, logits)
        ]  # fmt: skip
        by_row = processor_bytes(3, 331, shards)
        assert sum(held[0]) == by_row
        config = EngineConfig(max_num_seqs=3)
        model = cast(ModelConfig, SimpleNamespace(vocab_size=331))
        assert sum(held[0]) + sum(held[1]) == processing_bytes(model, config, BUCKETS, shards)


class Device:
    """A GPU of 100 GB, of which the weights are used and jax may have all."""

    def __init__(self, limit: int = 100 * GB, used: int = WEIGHTS, process: int = 0) -> None:
        self.limit, self.used, self.process_index = limit, used, process

    def memory_stats(self) -> dict[str, int]:
        assert self.process_index == 0, "another process's device can't be asked"
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def mesh_of(*devices: Device) -> Any:
    """Seen from process 0, as jax's Mesh tells which devices are a process's own."""
    local = [device for device in devices if device.process_index == 0]
    return SimpleNamespace(devices=np.array(devices), local_devices=local, size=1)


class FakeExecutor:
    """Compiles nothing, and says what a step then needs."""

    def __init__(self, needs: list[int], **options: Any) -> None:
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "dtype": "bfloat16"} | options
        self.model, self.engine = MODEL, EngineConfig(**options).resolve(MODEL)
        self.mesh = mesh_of(Device())
        self.params = {"w": SimpleNamespace(nbytes=GB // 10)}
        self.needs, self.compiled = needs, list[tuple[int, tuple[Bucket, ...]]]()

    def compile(self, num_blocks: int, buckets: tuple[Bucket, ...]) -> None:
        self.compiled.append((num_blocks, buckets))

    def transient_bytes(self) -> int:
        return self.needs[min(len(self.compiled), len(self.needs)) - 1]


def chosen(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("jaxvllm.runtime.memory.backend_memory_fraction", lambda: 1.0)
    monkeypatch.setattr("jax.tree.leaves", lambda tree: list(tree.values()))
    return choose_num_blocks(cast(Executor, executor), BUCKETS)


def most(transient: int, executor: FakeExecutor) -> int:
    """Blocks in 90 % of the device, less 1 %, with so much for a step; rounded down to 1/128 of the budget."""
    kept = WEIGHTS + processing_bytes(MODEL, executor.engine, BUCKETS, 1)
    return (90 * GB - 9 * GB // 10 - kept - transient) // BLOCK // (90 * GB // 128 // BLOCK) * (90 * GB // 128 // BLOCK)


TUNING = GB // 10 * 3 // 2 + (512 << 20)


def test_an_estimate_that_holds_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor([10 << 20])
    assert transient_estimate(MODEL, executor.engine) * 5 // 4 < TUNING
    assert chosen(executor, monkeypatch) == most(TUNING, executor)
    assert executor.compiled == [(most(TUNING, executor), BUCKETS.all)]


def test_a_step_that_needs_more_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor([20 * GB, 20 * GB + 1000, 20 * GB])
    assert chosen(executor, monkeypatch) == most(20 * GB + 1000, executor) < most(TUNING, executor)
    assert len(executor.compiled) == 3 and executor.compiled[-1][0] == most(20 * GB + 1000, executor)


def test_an_estimate_far_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxvllm.runtime.memory.transient_estimate", lambda *_: 40 * GB)
    executor = FakeExecutor([GB])
    assert chosen(executor, monkeypatch) == most(GB, executor)
    assert [blocks for blocks, _ in executor.compiled] == [most(50 * GB, executor), most(GB, executor)]


@pytest.mark.parametrize("figures", [[5 * GB, GB] * 9, [GB, 40 * GB, GB, 50 * GB], [20 * GB, GB, 19 * GB]])
def test_figures_that_change_with_the_pool_come_to_an_end(figures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor(figures)
    blocks = chosen(executor, monkeypatch)
    assert executor.compiled[-1][0] == blocks <= most(executor.transient_bytes(), executor)
    assert len(executor.compiled) <= 4


def test_a_need_that_rises_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set num_blocks"):
        chosen(FakeExecutor([20 * GB, 21 * GB, 22 * GB, 23 * GB, 24 * GB]), monkeypatch)


def test_a_step_that_copies_the_pool_gets_one_that_fits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor([])
    monkeypatch.setattr(executor, "transient_bytes", lambda: executor.compiled[-1][0] * BLOCK)
    blocks = chosen(executor, monkeypatch)
    assert 0 < 2 * blocks <= most(0, executor) and len(executor.compiled) <= 4


def test_without_warm_up_the_largest_step_of_each_kind_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor([GB], warmup=False)
    assert chosen(executor, monkeypatch) == most(GB, executor)
    assert executor.compiled[0][1] == (Bucket("decode", 8, 8), Bucket("ragged", 64, 8))


def test_processes_that_share_a_model_find_the_least_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks its own devices; budget, use and the steps' need are those of the worst."""
    monkeypatch.setattr("jaxvllm.runtime.memory.backend_memory_fraction", lambda: 1.0)
    monkeypatch.setattr("jax.tree.leaves", lambda tree: list(tree.values()))
    own = [[Device(), Device(limit=99 * GB)], [Device(used=3 * GB), Device()]]
    executors, barrier, found, least = [], threading.Barrier(2, timeout=10), [0, 0], [0, 0]
    for devices, needs in zip(own, ([GB, 2 * GB], [GB // 2, GB]), strict=True):
        executors.append(FakeExecutor(needs))
        executors[-1].mesh = mesh_of(*devices, Device(process=1))

    def choose(i: int) -> None:
        def smallest(value: int) -> int:
            least[i] = value
            barrier.wait()
            result = min(least)
            barrier.wait()
            return result

        found[i] = choose_num_blocks(cast(Executor, executors[i]), BUCKETS, smallest)

    threads = [threading.Thread(target=choose, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    alone = FakeExecutor([GB, 2 * GB])
    alone.mesh = mesh_of(Device(limit=99 * GB, used=3 * GB))
    assert found == [choose_num_blocks(cast(Executor, alone), BUCKETS)] * 2
    assert executors[0].compiled == executors[1].compiled == alone.compiled


def test_what_cannot_fit_is_said_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"leaves room for 0 blocks of 64 tokens.*needs 64: lower max_model_len"):
        chosen(FakeExecutor([89 * GB]), monkeypatch)


def test_a_pool_smaller_than_the_longest_request_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig(num_blocks=64).resolve(MODEL).max_model_len == 4096 and not caplog.records
    assert EngineConfig(num_blocks=2).resolve(MODEL).max_model_len == 129
    assert "num_blocks=2 of 64 tokens: a request has at most 129 tokens, not max_model_len=4096" in caplog.text
