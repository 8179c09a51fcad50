"""Weights that change under a running engine, as in a training loop: old cache entries are never matched (CASES 21)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxvllm import ModelConfig, SamplingParams
from jaxvllm.convert import load_params
from jaxvllm.models import params as tables
from jaxvllm.models import qwen3
from tests.device.support import DATA, make_engine

OTHER = DATA / "untied_sharded_index"
MQA = DATA / "mqa_one_kv_head_odd_vocab"
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
        llm.add_request(PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            llm.update_weights(weights)
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert outputs[0].token_ids == before
