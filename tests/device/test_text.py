"""Text through the engine: stop strings, special tokens, bad words, chat, streams, defaults of the checkpoint."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import Engine, RequestOutputKind, SamplingParams, record, replay
from tests.device.support import KJV, KJV_SHAPES, make_engine

PROMPT = "And it came to pass, that"
END = 0
TEMPLATE = (
    "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% if enable_thinking is defined and not enable_thinking %} ({{ mood }})"
    "{% endif %}{% endif %}"
)


def small(path: Path = KJV, **options: Any) -> Engine:
    return make_engine(path, warmup=False, **(KJV_SHAPES | options))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(KJV, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with small(folder) as engine:
        yield engine
        engine._scheduler.check_integrity()
        assert engine.stats()["blocks_free"] == 60 and not engine._tracked and not engine._completions


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24, "ignore_eos": True} | changes))


def complete(llm: Engine, **changes: Any) -> Any:
    return llm.generate(PROMPT, greedy(**changes), use_tqdm=False)[0].outputs[0]


def test_stop_strings_cut_the_text_and_end_the_request(llm: Engine) -> None:
    free = complete(llm)
    pieces = [llm.tokenizer.token_text(token) for token in free.token_ids]  # type: ignore[union-attr]
    border = len("".join(pieces[:6]))
    stop = free.text[border - 2 : border + 2]  # over the border of two tokens
    at = free.text.index(stop)
    for include in (False, True):
        cut = complete(llm, stop=["never comes", stop], include_stop_str_in_output=include)
        assert cut.text == free.text[: at + len(stop) * include]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
        assert stop not in "".join(pieces[: len(cut.token_ids) - 1])  # it ended as soon as it could
    later = complete(llm, stop=stop, min_tokens=len(cut.token_ids))  # ignored that early
    assert len(later.token_ids) > len(cut.token_ids)
    last = complete(llm, stop=stop, max_tokens=len(cut.token_ids))  # with the last token that it may have
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_tokens_that_end_a_request_are_no_text(llm: Engine) -> None:
    free = complete(llm)
    word = free.token_ids[4]
    first = free.token_ids.index(word)
    for include in (False, True):
        ended = complete(llm, stop_token_ids=[word], include_stop_str_in_output=include)
        assert ended.token_ids == free.token_ids[: first + 1] and ended.stop_reason == word
        assert ended.text == llm.tokenizer.decode(free.token_ids[: first + include])  # type: ignore[union-attr]
    kept = complete(llm, stop_token_ids=[word], min_tokens=first + 3)
    assert len(kept.token_ids) >= first + 3 and word not in kept.token_ids[: first + 2]
    ended = complete(llm, ignore_eos=False, logit_bias={END: 1000.0}, min_tokens=3)
    assert ended.token_ids[3] == END and len(ended.token_ids) == 4
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_special_tokens_and_no_text_at_all(llm: Engine) -> None:
    ends = {"allowed_token_ids": [END], "max_tokens": 2}
    assert complete(llm, **ends).text == ""
    assert complete(llm, **ends, skip_special_tokens=False).text == "<|endoftext|>" * 2
    assert complete(llm, detokenize=False).text == "" and complete(llm, detokenize=False).token_ids


def test_bad_words_never_come(llm: Engine) -> None:
    words = [word for word in complete(llm).text.split() if len(word) > 3][:2]
    text = complete(llm, bad_words=words).text
    assert text and not set(words) & set(text.split())


def test_text_of_alternatives(llm: Engine) -> None:
    output = complete(llm, logprobs=2, max_tokens=3)
    assert "".join(next(iter(entry.values())).decoded_token for entry in output.logprobs) == output.text


def test_chat_writes_the_template_once(llm: Engine) -> None:
    messages = [{"role": "user", "content": "who built the ark?"}]
    output = llm.chat(messages, greedy(max_tokens=3), use_tqdm=False)[0]
    assert output.prompt == "<|endoftext|>user: who built the ark?\nanswer:"
    assert output.prompt_token_ids.count(END) == 1
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)  # type: ignore
    two = llm.chat([messages, messages], greedy(max_tokens=3), use_tqdm=False, enable_thinking=False,
                   chat_template_kwargs={"mood": "calm"}, add_generation_prompt=True)  # fmt: skip
    assert [one.prompt for one in two] == [f"{output.prompt} (calm)"] * 2
    own = llm.chat(messages, greedy(max_tokens=3), use_tqdm=False, chat_template="Q: {{ messages[0].content }} A:")[0]
    assert own.prompt == "Q: who built the ark? A:"
    with pytest.raises(ValueError, match="messages"):
        llm.chat("hello", use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams(llm: Engine, kind: RequestOutputKind) -> None:
    changes: dict[str, Any] = {"stop": ["\n"], "logprobs": 1, "temperature": 0.9, "seed": 3}
    whole = complete(llm, **changes)
    other = llm.add_request(PROMPT, greedy())  # goes on meanwhile, and its news isn't lost
    parts = [output.outputs[0] for output in llm.stream(PROMPT, greedy(**changes, output_kind=kind))]
    assert parts[-1].finish_reason == whole.finish_reason
    if kind is RequestOutputKind.DELTA:
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == whole.logprobs
    else:
        assert (parts[-1].text, parts[-1].token_ids, parts[-1].logprobs) == (
            whole.text,
            whole.token_ids,
            whole.logprobs,
        )
        assert len(parts) == 1 or kind is RequestOutputKind.CUMULATIVE
        assert all(after.text.startswith(before.text) for before, after in itertools.pairwise(parts))
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs[other].text == complete(llm).text


def test_step_gives_deltas_and_final_outputs(llm: Engine) -> None:
    whole = complete(llm)
    for kind in RequestOutputKind:
        llm.add_request(PROMPT, greedy(output_kind=kind), request_id=kind.name)
    parts: dict[str, list[Any]] = {kind.name: [] for kind in RequestOutputKind}
    while llm.has_unfinished_requests():
        for output in llm.step():
            parts[output.request_id].append(output.outputs[0])
    assert len(parts["FINAL_ONLY"]) == 1 and parts["FINAL_ONLY"][0].text == whole.text
    assert "".join(part.text for part in parts["DELTA"]) == whole.text
    assert parts["CUMULATIVE"][-1].token_ids == whole.token_ids and len(parts["CUMULATIVE"]) == 24


def test_a_closed_stream_frees_its_blocks(llm: Engine) -> None:
    stream = llm.stream(PROMPT, greedy(n=1, max_tokens=60))
    next(stream)
    assert llm.stats()["blocks_free"] < 60
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats()["blocks_free"] == 60 and not llm.has_unfinished_requests()
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream([])


def test_defaults_of_the_checkpoint(llm: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.8)
    from jaxvllm.generation_defaults import default_params

    (tmp_path / "generation_config.json").write_text(
        json.dumps({"top_k": 20, "top_p": 0.95, "min_p": None, "max_new_tokens": 7, "repetition_penalty": 1.1, "x": 1})
    )
    with caplog.at_level(logging.INFO):
        found = default_params(tmp_path)
    assert found == SamplingParams(top_k=20, top_p=0.95, max_tokens=7, repetition_penalty=1.1)
    assert "generation_config='none' switches that off" in caplog.text
    assert default_params(None) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=7"):
        default_params(tmp_path)


def test_stop_strings_and_samples_are_recorded(llm: Engine, tmp_path: Path) -> None:
    with record(llm, tmp_path / "run.json"):
        llm.generate([PROMPT, "the"], greedy(stop=[" "], max_tokens=9), use_tqdm=False)
        llm.generate(PROMPT, SamplingParams(n=3, max_tokens=5, seed=1), use_tqdm=False)
    recorded = json.loads((tmp_path / "run.json").read_text())
    assert recorded["complete"] and "abort" in {event[1] for event in recorded["events"]}
    assert replay.replay(recorded) == []


def test_ids_as_one_array_end_at_stop_strings_too(llm: Engine) -> None:
    wish = greedy(stop="the", max_tokens=20, temperature=0.9, seed=1)
    whole = complete(llm, stop="the", max_tokens=20, temperature=0.9, seed=1)
    assert whole.finish_reason == "stop"
    assert llm.generate_ids(PROMPT, wish).tolist() == [[whole.token_ids]]
