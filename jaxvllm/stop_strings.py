"""The text of one completion: decoded as its tokens come, ended by stop strings, shown as far as it is decided.

Owns: the search for stop strings and what has to be held back for them. Must not know: requests, engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxvllm.detokenizer import Detokenizer


class CompletionText:
    """``text`` is all that was decoded, cut at a stop string; ``shown`` is what no later token can take back.

    A stop string ends the text where it is completed, wherever the tokens' borders lie: of several, the one that is
    complete first counts, and of those that end together the first in the list.
    """

    def __init__(self, stream: Detokenizer, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._stream = stream
        self._stop, self._include_stop = tuple(stop), include_stop
        self._longest = max(map(len, self._stop), default=0)
        self._flushed = False
        self.text = ""
        self.stop_string: str | None = None

    def push(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str | None:
        """Takes the next ids; returns the stop string that ended the text, if one did. Then nothing more is taken.

        may_stop=False (before min_tokens): stop strings that end in this text don't count.
        """
        if self.stop_string is not None:
            return self.stop_string
        checked = len(self.text)
        self.text += self._stream.push(token_ids)
        if self._stop and may_stop and len(self.text) > checked:
            self._look_for_stop(checked)
        return self.stop_string

    def flush(self) -> None:
        """The completion has ended: what the decoder still holds comes out, and all is shown."""
        if not self._flushed and self.stop_string is None:
            self.text += self._stream.flush()
        self._flushed = True

    @property
    def shown(self) -> str:
        """``text`` without an end that may turn out to be the beginning of a stop string."""
        return self.text[: len(self.text) - self._num_undecided()]

    def _look_for_stop(self, checked: int) -> None:
        ends = []
        for order, stop in enumerate(self._stop):
            at = self.text.find(stop, max(0, checked - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), order, at))
        if ends:
            end, order, at = min(ends)
            self.stop_string = self._stop[order]
            self.text = self.text[: end if self._include_stop else at]

    def _num_undecided(self) -> int:
        if self._flushed or self._include_stop or self.stop_string is not None:
            return 0
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop if len(stop) > size):
                return size
        return 0
