"""Engines on the devices of a mesh: replicas side by side in one program, and meshes that can't be had."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxvllm import Engine, ModelConfig
from jaxvllm.config import ConfigError
from jaxvllm.runtime.executor import queue_of
from tests.device.support import MODEL, ONE_LAYER, make_engine, random_prompts, sampled, tokens_of

SMALL = ModelConfig(**ONE_LAYER)
PROMPTS, WISHES = random_prompts(7, seed=3), sampled(7, max_tokens=8)


def mesh_of(first: int, last: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first:last]), ("tp",))


def arrays_of(engine: Engine) -> list[jax.Array]:
    """All that an engine keeps on devices, and the tokens on their way."""
    executor = engine._executor
    trees = executor.params, executor.state, executor.processors, executor._logits
    return [*jax.tree.leaves(trees), *(handle.tokens for _, handle in engine._in_flight)]


def devices_of(engine: Engine) -> set[Any]:
    return set().union(*(array.sharding.device_set for array in arrays_of(engine)))


def test_two_replicas_give_one_engines_tokens_and_stay_on_their_devices() -> None:
    with make_engine(SMALL, tensor_parallel_size=2) as alone:
        expected = tokens_of(alone, PROMPTS, WISHES)
        assert devices_of(alone) == set(jax.devices()[:2])
    before = {id(array) for array in jax.live_arrays()}
    with make_engine(SMALL, mesh=mesh_of(0, 2)) as one, make_engine(SMALL, mesh=mesh_of(2, 4)) as two:
        engines = {one: set(jax.devices()[:2]), two: set(jax.devices()[2:4])}
        for engine, devices in engines.items():
            assert engine.config.tensor_parallel_size == 2
            assert devices_of(engine) == devices
        kept = {id(array) for engine in engines for array in arrays_of(engine)}
        strangers = [array for array in jax.live_arrays() if id(array) not in before | kept]
        assert not strangers

        found: dict[Engine, dict[str, list[int]]] = {one: {}, two: {}}  # step by step, one after the other
        for i, (prompt, wish) in enumerate(zip(PROMPTS, WISHES, strict=True)):
            for engine in engines:
                engine.add_request(prompt, wish, request_id=str(i))
        while any(engine.has_unfinished_requests() for engine in engines):
            for engine, devices in engines.items():
                found[engine] |= {output.request_id: output.token_ids for output in engine.step()}
                assert devices_of(engine) == devices
        for engine in engines:
            assert [found[engine][str(i)] for i in range(len(PROMPTS))] == expected

        tokens: dict[Engine, list[list[int]]] = {}
        threads = [
            threading.Thread(target=lambda engine=engine: tokens.update({engine: tokens_of(engine, PROMPTS, WISHES)}))
            for engine in engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tokens == {one: expected, two: expected}


@pytest.mark.parametrize("shards", [1, 2])
def test_steps_over_several_devices_come_in_one_order_on_all_of_them(shards: int) -> None:
    """The order's locks are held while a step is dispatched, and by nobody else: two engines in threads share them."""
    with make_engine(SMALL, tensor_parallel_size=shards) as engine:
        executor, held = engine._executor, []
        queues = [queue_of(device) for device in jax.devices()]
        for bucket, compiled in list(executor._steps.items()):
            executor._steps[bucket] = lambda *args, compiled=compiled: (
                held.append([queue.locked() for queue in queues]) or compiled(*args)
            )
        tokens_of(engine, PROMPTS[:2], WISHES[:2])
        used = shards if shards > 1 else 0
        assert held and all(one == [True] * used + [False] * (len(queues) - used) for one in held)
        assert not any(queue.locked() for queue in queues)


def test_axes_of_size_one_do_not_matter() -> None:
    mesh = Mesh(np.array(jax.devices()[6:8]).reshape(1, 2, 1), ("data", "tp", "fsdp"))
    with make_engine(mesh=mesh, tensor_parallel_size=2, warmup=False) as engine:
        assert engine._executor.mesh.axis_names == ("tp",)
        assert list(engine._executor.mesh.devices) == jax.devices()[6:8]


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (lambda: Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tp")), {},
         r"mesh has the axes \{'data': 2, 'tp': 2\}.*e\.g\. Mesh\(devices\[i : i \+ 2\], \(\"tp\",\)\)"),
        (lambda: Mesh(np.array(jax.devices()[:2]), ("model",)), {}, r"mesh has the axes \{'model': 2\}"),
        (lambda: jax.devices()[:2], {}, r"mesh is a list; pass jax\.sharding\.Mesh"),
        (lambda: mesh_of(0, 2), {"tensor_parallel_size": 4}, "tensor_parallel_size=4, but the mesh has 2 devices"),
        (lambda: mesh_of(0, 1), {"tensor_parallel_size": True}, "tensor_parallel_size=True, but the mesh has 1 dev"),
        (lambda: mesh_of(0, 2), {"tensor_parallel_size": 2.0}, r"tensor_parallel_size=2\.0, but the mesh has 2"),
        (lambda: mesh_of(0, 0), {}, "mesh has no devices: each shard of the model needs a device"),
        (lambda: Mesh(np.array(jax.devices()[1:2] * 2), ("tp",)), {}, r"mesh has \S+:1 more than once: each shard"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_had_is_refused(mesh: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(MODEL, mesh=mesh(), num_blocks=8, warmup=False, **options)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (lambda: jax.devices()[:2], r"mesh is a list; pass jax\.sharding\.Mesh"),
        (lambda: AbstractMesh((2,), ("tp",)), "mesh is a AbstractMesh; pass"),
        (lambda: Mesh(np.array([jax.devices()[1:3]] * 2), ("a", "b")), r"mesh has \S+:1, \S+:2 more than once"),
    ],
)
def test_from_params_refuses_such_meshes_too(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.from_params(ModelConfig.from_dir(MODEL), {}, mesh=mesh())


def test_an_engine_of_one_process_does_not_follow() -> None:
    with make_engine(warmup=False) as engine, pytest.raises(RuntimeError, match="this one leads"):
        engine.follow()
