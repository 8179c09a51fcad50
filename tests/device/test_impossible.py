"""What can't be heeded is refused by name before anything runs: nothing is queued, nothing counts as aborted."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from jaxvllm.models.registry import param_table
from jaxvllm.processing import bad_word_ids, check_possible
from jaxvllm.replay import main as replay
from jaxvllm.tokenizer import Tokenizer
from tests.device.support import KJV, engine_left_clean


@pytest.fixture(scope="module")
def llm():
    with engine_left_clean(40, rows=3) as engine:
        yield engine


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [7, 8], "bad_words": [[8], [7]]}, r"allowed_token_ids=\[7, 8\] are all bad_words"),
        (
            {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2},
            r"\[9\] are all end tokens.* min_tokens=2",
        ),
        ({"allowed_token_ids": [9, 7], "stop_token_ids": [9], "bad_words": [[7]], "min_tokens": 1}, "min_tokens=1"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens=1"),  # the model's own end
        ({"allowed_token_ids": [7, 8], "bad_words": [[7]]}, None),
        ({"allowed_token_ids": [7], "bad_words": [[8, 7]]}, None),  # 8 never comes
        ({"allowed_token_ids": [9, 7], "stop_token_ids": [9], "min_tokens": 3}, None),
        ({"allowed_token_ids": [9, 2], "stop_token_ids": [9]}, None),
    ],
)
def test_some_token_must_be_left(params: dict, message: str | None) -> None:
    wish = SamplingParams(max_tokens=3, **params)
    words = bad_word_ids(wish, None, 100)
    expected = nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        check_possible(wish, words, {2}, has_text=False)


def test_stop_strings_need_a_tokenizer_in_every_call(llm: Engine) -> None:
    wish, message = SamplingParams(max_tokens=3, stop=" of"), r"stop=\[' of'\] is text, but there is no tokenizer"
    before = llm.stats()
    for call in (llm.generate, llm.generate_ids):
        with pytest.raises(ValueError, match=message):
            call([[1, 2], [3]], wish)
    with pytest.raises(ValueError, match=message):
        llm.add_request([1, 2], wish)
    with pytest.raises(ValueError, match=message):
        llm.stream([1, 2], wish)
    assert llm.stats() == before


def test_a_prompt_that_never_fits_is_named_by_its_place(llm: Engine) -> None:
    before = llm.stats()
    prompts = [[1, 2]] * 5 + [[5] * 2000] + [[1]]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^prompts\[5\] has a prompt of 2000 tokens"):
            llm.generate(prompts, use_tqdm=False)
    assert llm.stats() == before  # none was aborted


def test_an_empty_list_of_parameters_is_not_none(llm: Engine) -> None:
    with pytest.raises(ValueError, match="0 entries for 1 prompts"):
        llm.generate_ids([[1]], [])


def test_weights_inside_jit_are_named(llm: Engine) -> None:
    def update(weight: jax.Array) -> jax.Array:
        llm.update_params({"model.norm.weight": weight})
        return weight

    with pytest.raises(ValueError, match="traced values"):
        jax.jit(update)(jnp.ones(4))


def test_a_tied_models_state_dict_may_name_its_head(llm: Engine) -> None:
    """As a checkpoint on disk may: equal it is dropped, another one is refused."""
    assert llm.model_config.tie_word_embeddings
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sources = [source for info in param_table(llm.model_config).values() for source in info.sources]
    rng = np.random.default_rng(0)
    params = {source.name: jnp.asarray(rng.normal(size=source.shape), jnp.float32) for source in sources}
    embedding = params["model.embed_tokens.weight"]
    llm.update_params(params)
    expected = llm.generate_ids([[5, 6, 7]], greedy)
    for head in (embedding, embedding + 0, np.asarray(embedding)):
        llm.update_params(params | {"lm_head.weight": head})
        assert np.array_equal(llm.generate_ids([[5, 6, 7]], greedy), expected)
    for head in (embedding + 1, embedding[:-1]):
        with pytest.raises(ValueError, match=r"lm_head\.weight is unknown"):
            llm.update_params(params | {"lm_head.weight": head})


def test_templates_that_fail_are_value_errors() -> None:
    tokenizer = Tokenizer.from_dir(KJV)
    assert tokenizer is not None
    message = [{"role": "user"}]
    for template in ("{% for m in", "{{ messages[0].content.upper() }}"):
        with pytest.raises(ValueError, match="the chat template can't write these messages: "):
            tokenizer.apply_chat_template(message, chat_template=template)


def test_a_list_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "list.json"
    file.write_text(json.dumps([]))
    assert replay([str(file)]) == 1
    assert "not a recording that can be replayed: ValueError: a recording is a JSON object" in capsys.readouterr().out
