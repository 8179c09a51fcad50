"""A model directory's tokenizer: text to ids, ids to text, chat messages to text.

Owns the choice of library: `tokenizers` alone when the directory has a tokenizer.json that says everything
(0.1 s to import), `transformers` (seconds) for other files and for chat templates. Never uses the network.
Must not know about engines, requests or jax.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.detokenizer import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer

if TYPE_CHECKING:
    import tokenizers

VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
)


class Tokenizer:
    """Encodes and decodes with a `tokenizers.Tokenizer`; made by `Tokenizer.from_dir`.

    eos_token_id: the tokenizer's own end token, or None. A model may list others: the engine takes the union.
    vocab_size: ids that have a token, added ones included; the model's vocabulary may be larger (padding).
    """

    def __init__(self, backend: "tokenizers.Tokenizer", path: Path, eos_token: str | None = None) -> None:
        # A tokenizer.json may carry truncation or padding from training: prompts are neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._path = path
        self._chat: Any = None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = backend.token_to_id(eos_token) if eos_token else None
        self._automatic = backend.encode("", add_special_tokens=True).ids
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes = TokenBytes(backend, dict.fromkeys(self._special_ids, b""))
        self._all_bytes = TokenBytes(backend, {i: added[i].content.encode() for i in self._special_ids})
        self._decoders = _decoder_types(backend)

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a model directory, or None when it has no vocabulary file (ids are served then).

        Raises ValueError that names the directory when its files can't be read.
        """
        path = Path(path)
        if not any((path / name).is_file() for name in VOCABULARY_FILES):
            return None
        try:
            config = _read_json(path / "tokenizer_config.json")
            eos_token = _content(config.get("eos_token"))
            backend = _load_plain(path, config)
            if backend is not None:
                return cls(backend, path, eos_token)
            auto = _load_auto(path)
            return cls(auto.backend_tokenizer, path, auto.eos_token)
        except Exception as error:
            raise ValueError(f"the tokenizer in {path} can't be loaded: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. A start token that the text spells out already isn't added a second time.

        Raises ValueError for anything that isn't valid text (lone surrogates, other types).
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for many texts, in parallel."""
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a text prompt must be a string, not {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the prompt {text[:40]!r} isn't valid Unicode text: {error}") from error
        # "fast" leaves out the offsets, which nobody here needs.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [self._without_doubled_start(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens or with; ids beyond the vocabulary have no text."""
        ids = [int(token_id) for token_id in token_ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special ones included; part of a character is shown as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for one request's output."""
        if self._decoders == ("ByteLevel",):
            return ByteDetokenizer(self._token_bytes if skip_special_tokens else self._all_bytes, prompt_token_ids)
        fallback_ids: frozenset[int] = frozenset()
        if "ByteFallback" in self._decoders:
            ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
            fallback_ids = frozenset(i for i in ids if i is not None)
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._backend, skipped, fallback_ids, prompt_token_ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation, by the directory's own chat template.

        kwargs go to the template (Qwen3's enable_thinking, tools, ...), but for chat_template: another one, as Jinja
        text, in the directory's place. Encode the result with add_special_tokens=False, as `encode_chat` does: the
        template has written them already.
        """
        if self._chat is None:
            self._chat = _load_auto(self._path)
        if not (kwargs.get("chat_template") or self._chat.chat_template):
            raise ValueError(
                f"{self._path} has no chat template (chat_template.jinja or tokenizer_config.json): give "
                "chat_template, or write the prompt's text yourself"
            )
        try:
            return self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:
            if not type(error).__module__.startswith("jinja2"):
                raise
            raise ValueError(
                f"the chat template can't write these messages: {type(error).__name__}: {error}"
            ) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation: `apply_chat_template` encoded without adding special tokens."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _without_doubled_start(self, ids: list[int]) -> list[int]:
        start = self._automatic[:1]
        return ids[1:] if start and ids[:2] == start * 2 else ids


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _decoder_types(backend: "tokenizers.Tokenizer") -> tuple[str, ...]:
    """Names of the decoder's steps, outermost sequence flattened; empty without a decoder."""
    if backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return tuple(step["type"] for step in steps)


def _load_plain(path: Path, config: Mapping[str, Any]) -> "tokenizers.Tokenizer | None":
    """tokenizer.json alone; None when tokenizer_config.json changes what it does (transformers knows how)."""
    if not (path / "tokenizer.json").is_file():
        return None
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    added = {int(i): _content(token) for i, token in config.get("added_tokens_decoder", {}).items()}
    if any(backend.id_to_token(i) != content for i, content in added.items()):
        return None
    adds_tokens = config.get("add_bos_token") or config.get("add_eos_token")
    if adds_tokens and not backend.encode("", add_special_tokens=True).ids:
        return None
    return backend


def _not_about_pytorch(record: logging.LogRecord) -> bool:
    """transformers' import warns that it isn't there, which nobody misses here."""
    return "PyTorch was not found" not in record.getMessage()


def _load_auto(path: Path) -> Any:
    logging.getLogger("transformers").addFilter(_not_about_pytorch)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
