"""Weights that change under a running engine, as in a training loop: old cache entries are never matched (CASES 21)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import Engine, ModelConfig, SamplingParams
from jaxvllm.config import ConfigError
from jaxvllm.convert import load_params
from jaxvllm.models import params as tables
from jaxvllm.models import qwen3
from tests.device.support import make_engine, two_layers
from tests.kept_programs import kept_programs

OTHER = two_layers("untied_sharded_index")
MQA = two_layers("mqa_one_kv_head_odd_vocab")
PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def changed(model, seed: int) -> dict[str, np.ndarray]:
    """The checkpoint's parameters, each with noise: other weights of the same shapes."""
    rng = np.random.default_rng(seed)
    table = qwen3.param_table(ModelConfig.from_dir(model))
    return load_params(
        model, table, dtype="float32", put=lambda info, a: a + rng.normal(size=a.shape).astype(np.float32) * 0.05
    )


@pytest.mark.parametrize(("model", "shards"), [(OTHER, 1), (MQA, 2)])
def test_new_weights_give_the_outputs_of_a_fresh_engine(model, shards: int) -> None:
    weights = changed(model, 1)
    with make_engine(model, tensor_parallel_size=shards) as llm:
        before = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
        assert (llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].num_cached_tokens or 0) > 0
        on_device = {path: jax.numpy.asarray(value) for path, value in weights.items()}
        llm.update_weights(tables.nest(on_device))
        after = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
        assert after.num_cached_tokens == 0 and after.token_ids != before.token_ids
        llm.update_weights(weights)  # flat, from the host
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == after.token_ids
        assert llm.stats()["compiles_after_warmup"] == 0
        scores = llm.score(PROMPT)
    assert not any(array.is_deleted() for array in on_device.values())  # the trainer's arrays stay its own
    with make_engine(model, warmup=False) as fresh:
        fresh.update_weights(weights)
        assert fresh.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == after.token_ids
        np.testing.assert_allclose(fresh.score(PROMPT), scores, atol=1e-4)


def test_weights_that_do_not_fit_are_listed_and_change_nothing() -> None:
    weights = changed(OTHER, 2)
    with make_engine(OTHER, warmup=False) as llm:
        before = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        bad = {path: value for path, value in weights.items() if path != "head"}
        bad["layers.0.o"] = bad["layers.0.o"][:, 1:]
        bad["extra"] = bad["embed"]
        with pytest.raises(ValueError, match=r"head is missing; extra is unknown; layers\.0\.o has shape"):
            llm.update_weights(bad)
        unfused = logical(OTHER, weights)
        unfused["lm_head.bias"] = unfused.pop("model.layers.0.self_attn.k_proj.weight")
        with pytest.raises(ValueError, match=r"0\.self_attn\.k_proj\.weight is missing; lm_head\.bias is unknown"):
            llm.update_params(unfused)
        for strange in (
            {},
            {"params": weights},
            {path.replace(".", "/"): one for path, one in weights.items() if "." in path},
        ):
            with pytest.raises(
                ValueError, match=r"no name is a Hugging Face name, like model\.\S+, or a path, like \S+; there"
            ):
                llm.update_params(strange)
        with pytest.raises(ValueError, match="running='later'"):
            llm.update_params(weights, running="later")
        llm.add_request(PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            llm.update_weights(weights)
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert outputs[0].token_ids == before


def logical(model, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under their Hugging Face names, cut out of the fused ones by the table's own places."""
    table = qwen3.param_table(ModelConfig.from_dir(model))
    return {source.name: source.take(weights[path]) for path, info in table.items() for source in info.sources}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


# the second: a replicated head, a padded vocabulary
@pytest.mark.parametrize(("model", "shards"), [(OTHER, 1), (MQA, 2)])
def test_unfused_device_arrays_give_the_same_engine(model, shards: int) -> None:
    weights = changed(model, 3)
    config = ModelConfig.from_dir(model)
    options = {"block_size": 4, "num_blocks": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128,
               "decode_buckets": (4,), "token_buckets": (64,), "warmup": False, "enable_processors": False}  # fmt: skip
    with make_engine(model, warmup=False, tensor_parallel_size=shards) as llm:
        llm.update_weights(weights)
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        llm.update_weights(changed(model, 4))
        arrays = {name: jax.numpy.asarray(value) for name, value in logical(model, weights).items()}
        llm.update_params(arrays)
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected
    assert not any(array.is_deleted() for array in arrays.values())  # nor does the closed engine take them along
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2 : 2 + shards]), ("model",))
    with kept_programs():
        given = Engine.from_params(config, nested(arrays), mesh=mesh, **options)
    with given:
        assert given.generate(jax.numpy.asarray(PROMPT), GREEDY, use_tqdm=False)[0].token_ids == expected
        placed = {path: np.asarray(value) for path, value in tables.flatten(given._executor.params).items()}
        given.update_params(arrays, donate=True)
        assert given.generate_ids([PROMPT], GREEDY).tolist() == [[expected]]
        for path, value in tables.flatten(given._executor.params).items():
            np.testing.assert_array_equal(np.asarray(value), placed[path])
        assert all(array.is_deleted() for array in arrays.values())
        assert given._executor.params["embed"].sharding.device_set == set(mesh.devices.flat)
    with pytest.raises(TypeError, match=r"config is a \w+, it must be a ModelConfig: ModelConfig\.from_dir"):
        Engine.from_params(str(model), arrays)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=3, but the mesh has {shards} devices"):
        Engine.from_params(config, weights, mesh=mesh, tensor_parallel_size=3)


def test_running_requests_finish_or_restart() -> None:
    old, new = changed(OTHER, 5), changed(OTHER, 6)
    prompts = [PROMPT, [*PROMPT[:30], 1, 2, 3], list(range(60, 125))]  # the last one is longer than a chunk
    wish = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_engine(OTHER, warmup=False) as llm:
        llm.update_params(old)
        before = [output.token_ids for output in llm.generate(prompts, wish, use_tqdm=False)]
        llm.update_params(new)
        after = [output.token_ids for output in llm.generate(prompts, wish, use_tqdm=False)]
        assert all(one != two for one, two in zip(before, after, strict=True))
        for running, expected in (("finish", before), ("restart", after)):
            for steps in (1, 3, 5, 9):  # in the middle of a prompt, and of decoding
                llm.update_params(old)
                names = [llm.add_request(prompt, wish) for prompt in prompts]
                outputs = {}
                for _ in range(steps):
                    outputs |= {output.request_id: output for output in llm.step()}
                llm.update_params(new, running=running)
                llm._scheduler.check_integrity()
                while llm.has_unfinished_requests():
                    outputs |= {output.request_id: output for output in llm.step()}
                assert [outputs[name].token_ids for name in names] == expected
                assert llm.stats()["blocks_free"] == 96
                assert llm.generate([PROMPT], wish, use_tqdm=False)[0].token_ids == after[0]
        llm.start_recording()
        with pytest.raises(ValueError, match="can't be recorded"):
            llm.update_params(new, running="restart")


def test_ids_as_one_array() -> None:
    with make_engine(OTHER, warmup=False) as llm:
        wish = SamplingParams(n=2, max_tokens=6, seed=1, stop_token_ids=list(range(0, 331, 2)))
        prompts = jax.numpy.asarray([PROMPT[:8], PROMPT[8:16]])
        ids = llm.generate_ids(prompts, wish)
        assert ids.dtype == np.int32 and ids.shape[:2] == (2, 2)
        for row, output in zip(ids, llm.generate(prompts, wish, use_tqdm=False), strict=True):
            for line, one in zip(row, output.outputs, strict=True):
                assert line.tolist() == one.token_ids + [-1] * (ids.shape[2] - len(one.token_ids))
        assert (ids == -1).any()
        several = [replace(wish, seed=5), replace(wish, n=1, max_tokens=2)]
        ids = llm.generate_ids(prompts, several)
        assert ids.shape[:2] == (2, 2) and (ids[1, 1] == -1).all() and (ids[1, 0, 2:] == -1).all()
        expected = llm.generate(prompts[0], several[0], use_tqdm=False)[0]
        assert [line[line >= 0].tolist() for line in ids[0]] == [one.token_ids for one in expected.outputs]
        with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate_ids(prompts, [wish])


def tree(flat: Mapping[str, Any], *, lists: bool = False, numbers: bool = False) -> Any:
    """{"a.0.b": leaf} as nested dicts; layers as a list, or numbers as keys."""
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        *parts, last = name.split(".")
        place = nested
        for part in parts:
            place = place.setdefault(int(part) if part.isdigit() and numbers else part, {})
        place[last] = value
    holder = nested.get("model", nested)
    if lists:
        holder["layers"] = list(holder["layers"].values())
    return nested


def test_trees_of_any_kind_are_the_same_weights() -> None:
    weights = changed(OTHER, 5)
    unfused = logical(OTHER, weights)
    with make_engine(OTHER, warmup=False) as llm:

        def placed(params: Any) -> dict[str, np.ndarray]:
            llm.update_params(params)
            return {path: np.asarray(one) for path, one in tables.flatten(llm._executor.params).items()}

        expected, other = placed(weights), changed(OTHER, 6)
        for given in (tree(unfused), tree(unfused, lists=True), tree(unfused, numbers=True), tree(weights, lists=True),
                      tree(weights)):  # fmt: skip
            llm.update_params(other)
            found = placed(given)
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[path], one) for path, one in expected.items())


def test_new_weights_take_the_old_ones_memory() -> None:
    """No second copy: what was there is gone, in both forms; and the engine's own arrays may be handed back to it."""
    weights = changed(OTHER, 8)
    with make_engine(OTHER, warmup=False) as llm:
        llm.update_params(weights)
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        for form in (weights, logical(OTHER, weights)):
            before = jax.tree.leaves(llm._executor.params)
            llm.update_params(form)
            assert all(array.is_deleted() for array in before)
            assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected
        own = tables.flatten(llm._executor.params)
        llm.update_params(own)
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected
        names = {info.sources[0].name: path for path, info in qwen3.param_table(llm.model_config).items()
                 if len(info.sources) == 1 and info.sources[0].shape == info.shape}  # fmt: skip
        own = tables.flatten(llm._executor.params)
        llm.update_params(logical(OTHER, weights) | {name: own[path] for name, path in names.items()})
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_own_arrays_may_come_back_in_any_place_and_form() -> None:
    weights = changed(OTHER, 10)
    swapped = weights | {"embed": weights["head"], "head": weights["embed"]}
    with make_engine(OTHER, warmup=False) as llm:
        llm.update_params(swapped)
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        llm.update_params(weights)
        own = tables.flatten(llm._executor.params)
        llm.update_params(own | {"embed": own["head"], "head": own["embed"]})
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected
        embed = tables.flatten(llm._executor.params)["embed"].addressable_shards[0].data  # another object
        llm.update_params(logical(OTHER, swapped) | {"model.embed_tokens.weight": embed})
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_devices_in_another_order_and_odd_host_arrays_are_taken() -> None:
    weights = changed(MQA, 11)
    unfused = logical(MQA, weights)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1::-1]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with make_engine(MQA, tensor_parallel_size=2, warmup=False) as llm:
        llm.update_params(weights)
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        odd = dict(zip(unfused, ["<f4", ">f4", np.longdouble, list, np.ma.array] * 99, strict=False))
        made = {n: v.tolist() if odd[n] is list else odd[n](v) if odd[n] is np.ma.array else v.astype(odd[n])
                for n, v in unfused.items()}  # fmt: skip
        for form in ({n: jax.device_put(v, everywhere) for n, v in unfused.items()}, made):
            llm.update_params(form)
            assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_what_is_no_array_of_numbers_is_named_and_an_error_in_the_middle_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = changed(OTHER, 9)
    gone = jax.numpy.asarray(weights["embed"])
    gone.delete()
    with make_engine(OTHER, warmup=False) as llm:
        before = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids
        bad = weights | {"embed": gone, "head": weights["head"].astype(str)}
        with pytest.raises(ValueError, match=r"(?=.*embed has been deleted or donated)(?=.*head is of dtype <U)"):
            llm.update_params(bad, running="restart")
        for wrong in ("weights.npz", [1]):
            with pytest.raises(ValueError, match=f"params is a {type(wrong).__name__}: give"):
                llm.update_params(wrong)  # type: ignore[arg-type]
        shape = jax.ShapeDtypeStruct(weights["embed"].shape, np.float32)
        keys = jax.random.split(jax.random.key(0), weights["embed"].size).reshape(weights["embed"].shape)
        for no_numbers in (shape, keys, weights["embed"] * 1j):
            with pytest.raises(ValueError, match="embed is of dtype"):
                llm.update_params(weights | {"embed": no_numbers})
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].token_ids == before

        def failing(*_: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(llm._executor.placer, "_place_one", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.update_params(weights)
        with pytest.raises(RuntimeError, match="new weights could not be placed: out of memory"):
            llm.generate([PROMPT], GREEDY, use_tqdm=False)


def test_prompt_logprobs_survive_a_restart_after_the_first_of_two_samples_ended() -> None:
    weights = changed(OTHER, 12)
    with make_engine(OTHER, warmup=False, enable_processors=True) as llm:
        llm.update_params(weights)
        wanted = None
        for seed in range(30):
            params = SamplingParams(n=2, temperature=1.0, seed=seed, max_tokens=20, prompt_logprobs=0,
                                    stop_token_ids=list(range(0, 331, 6)))  # fmt: skip
            wanted = llm.generate([PROMPT], params, use_tqdm=False)[0]
            lengths = [len(one.token_ids) for one in wanted.outputs]
            if lengths[0] + 4 < lengths[1]:
                break
        assert wanted is not None and lengths[0] + 4 < lengths[1]
        llm.add_request(PROMPT, params)
        outputs: list[Any] = []
        while not any(o.outputs[0].finish_reason for o in outputs):
            outputs = llm.step()
        llm.update_params(weights, running="restart")
        while llm.has_unfinished_requests():
            outputs = llm.step() or outputs
        assert outputs[-1].prompt_logprobs == wanted.prompt_logprobs
