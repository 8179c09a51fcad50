"""Loading, encoding, decoding and chat templates of directories made on the spot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from jaxvllm.tokenizer import Tokenizer
from tests.api import tokenizers_for_tests as make

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "the cat"}]


def directory(path: Path, tokenizer: tokenizers.Tokenizer | None = None, **config: object) -> Path:
    (tokenizer or make.byte_level()).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer is not None
    return tokenizer


def test_round_trip_and_end_token(tmp_path: Path) -> None:
    oracle = make.byte_level()
    tokenizer = load(directory(tmp_path))
    text = "In the beginning 你好 👍<|im_end|>"
    assert tokenizer.encode(text) == oracle.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == "In the beginning 你好 👍"
    assert tokenizer.eos_token_id == oracle.token_to_id("<|im_end|>") == 2
    assert tokenizer.vocab_size == oracle.get_vocab_size()
    assert tokenizer.encode_batch(["the", "", "cat"]) == [oracle.encode(t).ids for t in ("the", "", "cat")]


def test_no_vocabulary_file_is_none(tmp_path: Path) -> None:
    assert Tokenizer.from_dir(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_dir(tmp_path) is None


def test_a_broken_file_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=tmp_path.name):
        Tokenizer.from_dir(tmp_path)


def test_truncation_and_padding_of_the_file_are_dropped(tmp_path: Path) -> None:
    raw = make.byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer = load(directory(tmp_path, raw))
    text = "the cat sat on the mat"
    assert tokenizer.encode(text) == make.byte_level().encode(text).ids


@pytest.mark.parametrize("bad", [7, None, b"the", "\ud800", ["the"]])
def test_what_is_not_text_is_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ValueError, match="prompt"):
        load(directory(tmp_path)).encode(bad)  # type: ignore[arg-type]


def test_a_start_token_is_added_once(tmp_path: Path) -> None:
    raw = make.byte_level()
    raw.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = load(directory(tmp_path, raw))
    the = make.byte_level().encode("the").ids
    assert tokenizer.encode("the") == [0, *the]
    assert tokenizer.encode("<|endoftext|>the") == [0, *the]
    assert tokenizer.encode("the", add_special_tokens=False) == the


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = load(directory(tmp_path))
    with pytest.raises(ValueError, match=r"no chat template .* give chat_template, or write"):
        tokenizer.apply_chat_template(CHAT)
    pytest.importorskip("jinja2")
    given = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert tokenizer.apply_chat_template(CHAT, chat_template=given) == "[the cat]"
    tokenizer = load(directory(tmp_path, chat_template=CHATML))
    text = tokenizer.apply_chat_template(CHAT)
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False) == text[: -len("<|im_start|>assistant\n")]
    assert tokenizer.apply_chat_template(CHAT, enable_thinking=False) == text + "<think>"
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(1) == 2
    assert ids.count(2) == 1


def test_chat_does_not_double_the_start_token(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    raw = make.byte_level()
    raw.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = load(directory(tmp_path, raw, chat_template="<|endoftext|>" + CHATML))
    assert tokenizer.encode_chat(CHAT).count(0) == 1
    assert tokenizer.encode(tokenizer.apply_chat_template(CHAT)).count(0) == 1


def test_tokens_that_only_the_config_adds_go_through_transformers(tmp_path: Path) -> None:
    size = make.byte_level().get_vocab_size()
    extra = {"content": "<tool>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    extra["single_word"] = False
    tokenizer = load(directory(tmp_path, added_tokens_decoder={str(size): extra}))
    assert tokenizer.encode("the<tool>") == [*make.byte_level().encode("the").ids, size]
    assert tokenizer.decode([size]) == ""


def test_loading_tokenizer_json_imports_neither_transformers_nor_jax(tmp_path: Path) -> None:
    code = (
        "import sys; from jaxvllm.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_dir({str(directory(tmp_path))!r}); t.decode(t.encode('the'))\n"
        "print([m for m in ('jax', 'transformers', 'jinja2') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
