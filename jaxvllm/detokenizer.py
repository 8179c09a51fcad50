"""Text of a request as its tokens arrive: deltas that are never taken back.

Owns the two ways to do it: `ByteDetokenizer` for byte-level vocabularies (Qwen's: one table lookup a token,
no call into `tokenizers`) and `WindowDetokenizer` for every other decoder. Both hold back what a later token
may still change, so that no replacement character is streamed which is resolved afterwards, and both satisfy

    "".join(deltas) + flush() == decode(prompt + output)[len(the prompt's settled text):]

where a prompt that ends inside a character has that one unsettled: the output that completes it shows it.
Must not know about requests, engines or files.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MIN_WINDOW_TOKENS = 5


class Detokenizer(Protocol):
    """Feed generated ids in order with `push`; call `flush` once when the request has ended."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids, returns the text that they settle ("" while a character is incomplete)."""
        ...

    def flush(self) -> str:
        """Text still held back: an incomplete character becomes U+FFFD, as in a full decode."""
        ...


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet |= {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return alphabet


class TokenBytes:
    """Bytes of each id of a byte-level vocabulary; those of special tokens are given, ids beyond it have none.

    A token with a character outside the alphabet (an added token such as "<a b>") stands for its own UTF-8.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", special: Mapping[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet()
        self._known = dict(special)

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            try:
                known = bytes(self._alphabet[character] for character in token)
            except KeyError:
                known = token.encode()
            self._known[token_id] = known
        return known


class ByteDetokenizer:
    """For vocabularies whose decoder concatenates bytes and reads them as UTF-8. O(1) a token."""

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int]) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Only an unfinished last character of the prompt matters, and it is shorter than MAX_CHARACTER_BYTES.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = token_bytes[int(token_id)] + tail
            if len(tail) >= MAX_CHARACTER_BYTES:
                break
        self._utf8.decode(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder: decodes the last few tokens anew and emits what is new once it can't change.

        prompt | emitted before | emitted last | pending
               ^ _ids start here (context: what comes first may lose its leading space)
                                               ^ _num_settled tokens, _num_emitted characters

    fallback_ids are the byte tokens (<0x00>..<0xFF>) of a vocabulary with byte fallback, empty without. Its
    decoder reads a whole run of them at once, and one bad byte turns all of the run into replacement
    characters: a run is held back until another token ends it. Tokens without text (special_ids, ids beyond
    the vocabulary) end nothing and are left out from the start.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        special_ids: frozenset[int],
        fallback_ids: frozenset[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._fallback_ids = fallback_ids
        self._ids = self._context([int(i) for i in prompt_token_ids if self._has_text(int(i))])
        self._num_settled = len(self._ids)
        self._num_emitted = len(self._settled_text())

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(i) for i in token_ids if self._has_text(i)])

    def flush(self) -> str:
        text = self._decode(self._ids)
        delta = text[self._num_emitted :]
        self._num_emitted = len(text)
        return delta

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        if token_id in self._fallback_ids:
            return ""
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        delta = text[self._num_emitted :]
        # The tokens of this delta are context enough for the next one.
        self._ids = self._ids[self._num_settled :]
        self._num_settled = len(self._ids)
        self._num_emitted = len(self._decode(self._ids))
        return delta

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # skipped ones never get here

    def _context(self, prompt: list[int]) -> list[int]:
        """The last few tokens of the prompt, not starting inside a run of byte tokens."""
        for start in range(len(prompt) - MIN_WINDOW_TOKENS, 0, -1):
            if prompt[start] not in self._fallback_ids:
                return prompt[start:]
        return prompt

    def _settled_text(self) -> str:
        """The context's text without an unfinished character at its end."""
        whole = self._decode(self._ids)
        text = whole
        for dropped in range(1, min(MAX_CHARACTER_BYTES, len(self._ids) + 1)):
            if not text.endswith(REPLACEMENT):
                return text
            text = self._decode(self._ids[:-dropped])
        return whole if text.endswith(REPLACEMENT) else text
