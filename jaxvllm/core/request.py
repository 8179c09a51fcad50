"""One request: its prompt, its wishes, and how far it has come.

Owns the identity of a request and its state while it has no row. Must not know about queues, blocks or
devices.

The four numbers that everything else is built on, for a prompt of 5 tokens after 3 more were sampled, two
of which the host knows and one of which is still on its way from the device:

    position     0   1   2   3   4   5   6   7
               [ p   p   p   p   p ][ o   o ][ ? ]
               |<- num_prompt = 5 ->|        |   |
               |<-------- num_known = 7 ---->|   |     ids that the host can read
               |<------- num_tokens = 8 -------->|     num_known + num_in_flight
               |<----- num_computed = 7 ---->|         keys and values are in the cache, or a step that
                                                       writes them has been dispatched

`num_computed` chases `num_tokens`. While it is far behind, the request is reading its prompt; once it is
one behind, each step computes that one token and samples the next: that is all there is to "prefill" and
"decode". Where a request with that gap stands is the policy's: prefill_first keeps it at the head of the waiting
queue between two chunks of its prompt, running_first counts it among the running from its first chunk on.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxvllm.core.rows import Rows
    from jaxvllm.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1
_NO_TOKENS = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False


class RequestStatus(enum.IntEnum):
    """WAITING -> RUNNING -> FINISHED; a preemption leads from RUNNING back to WAITING, an abort to FINISHED."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """One request, from `Scheduler.add` to its last token. Build it with `Request.create`.

    Two requests are equal only if they are the same object. While `row >= 0` the moving numbers live in the
    scheduler's `Rows`, where a step changes hundreds of them in one numpy operation, and this object is a
    handle.
    """

    request_id: str
    index: int  # how many were made before it; `arrival` tells the order of service
    prompt_token_ids: np.ndarray  # int32[num_prompt]
    params: SamplingParams
    seed: int  # sampling key, unsigned 64 bits
    eos_token_ids: frozenset[int]  # any of these ends the request
    user_stop_ids: frozenset[int] = frozenset()  # those of them that only the user asked for
    priority: int = 0  # smaller is more urgent; only policy="priority" looks at it
    min_tokens_masks: frozenset[int] = frozenset()  # what min_tokens keeps from being sampled: every end token
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not come up in the output
    has_siblings: bool = False  # others have the same prompt: it waits for their blocks instead of computing them

    # Seconds of time.perf_counter(); 0: not yet.
    arrival_time: float = 0.0
    admitted_time: float = 0.0  # its first admission
    first_token_time: float = 0.0  # the host knows its first token
    finished_time: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    row: int = -1  # index on the device, -1: none
    finish_reason: str | None = None  # None | "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the user's stop token or text that ended it; else None
    arrival: int = -1  # number among all requests that were added; set by Scheduler.add
    token_limit: int = 0  # it ends when it has this many tokens, prompt included; set by Scheduler.add
    num_cached_tokens: int = 0  # found in the prefix cache at its last admission
    first_cached_tokens: int = 0  # ... at its first
    num_admissions: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0  # computed, lost by a preemption, and not found again at readmission
    num_lost: int = 0  # computed tokens thrown away by its last preemption

    # Chained hashes of its full blocks, as far as somebody asked; they outlive a preemption.
    block_hashes: list[int] = field(default_factory=list)
    cache_generation: int = -1  # BlockPool.generation at its admission
    awaited: int | None = None  # hash of the longest prefix for whose writer it has waited
    num_awaited: int = 0  # ... that prefix's blocks

    # State without a row; Rows.assign and Rows.release move it in and out.
    rows: Rows | None = None
    detached_output: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    detached_in_flight: int = 0

    @classmethod
    def create(
        cls,
        request_id: str,
        index: int,
        prompt: Any,
        params: SamplingParams,
        *,
        model_eos: Iterable[int],
        engine_seed: int,
        priority: int = 0,
        bad_words: Iterable[tuple[int, ...]] = (),
        has_siblings: bool = False,
    ) -> Request:
        """A request for `prompt`: a list, tuple or one-dimensional integer array of token ids.

        `model_eos` end it unless `params.ignore_eos`; `params.stop_token_ids` end it in any case. Its seed
        is `params.seed`, or `mix_seed(engine_seed, index)`. `bad_words` are those of `params` as token ids.
        ValueError if the prompt is empty, is not one-dimensional or holds anything but ids in [0, 2**31), or if
        `priority` is no integer.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority={priority!r} of request {request_id!r} must be a whole number")
        model_ends = frozenset(int(token) for token in model_eos)
        eos = frozenset() if params.ignore_eos else model_ends
        stops = frozenset(params.stop_token_ids or ())
        seed = mix_seed(engine_seed, index) if params.seed is None else int(params.seed) & _MASK64
        tokens = _prompt_array(request_id, prompt)
        return cls(
            request_id,
            index,
            tokens,
            params,
            seed,
            eos_token_ids=eos | stops,
            user_stop_ids=stops - eos,
            priority=priority,
            min_tokens_masks=model_ends | stops,
            bad_words=tuple(bad_words),
            has_siblings=has_siblings,
            arrival_time=time.perf_counter(),
        )

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host has: the prompt and the outputs committed so far."""
        if self.rows is None:
            return len(self.prompt_token_ids) + len(self.detached_output)
        return int(self.rows.num_known[self.row])

    @property
    def num_tokens(self) -> int:
        """Known tokens and those still on their way from the device."""
        if self.rows is None:
            return self.num_known + self.detached_in_flight
        return int(self.rows.num_tokens[self.row])

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled by dispatched steps that are not committed yet."""
        return self.num_tokens - self.num_known

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache (or will be when the dispatched steps have run)."""
        return 0 if self.rows is None else int(self.rows.num_computed[self.row])

    @property
    def num_output(self) -> int:
        """Outputs that the host knows."""
        return self.num_known - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The outputs that the host knows, as a new list."""
        return self.outputs_since(0)

    def outputs_since(self, start: int) -> list[int]:
        """Known outputs from number `start` on; what a stream has not sent yet."""
        if self.rows is None:
            return self.detached_output[start:].tolist()
        return self.rows.tokens[self.row, self.num_prompt + start : self.num_known].tolist()

    @property
    def block_table(self) -> list[int]:
        """Ids of the blocks that it holds, in the order of its tokens."""
        if self.rows is None:
            return []
        return self.rows.block_tables[self.row, : self.rows.num_blocks[self.row]].tolist()

    def known_tokens(self) -> np.ndarray:
        """int32[num_known], prompt and outputs. Read only: it may be a view of the scheduler's own arrays."""
        if self.rows is not None:
            return self.rows.tokens[self.row, : self.num_known]
        if not len(self.detached_output):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.detached_output])

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, row={self.row}, computed={self.num_computed}, "
            f"known={self.num_known}, in_flight={self.num_in_flight})"
        )


def mix_seed(engine_seed: int, index: int) -> int:
    """The sampling seed of unseeded request number `index`: 64 well-mixed bits.

    It is output number `index` of a SplitMix64 generator (Steele, Lea and Flood 2014) whose state is itself
    a mixed `engine_seed`, so that neighbouring engine seeds do not share a shifted stream.
    """
    return splitmix64(splitmix64(engine_seed & _MASK64) + index * 0x9E3779B97F4A7C15)


def splitmix64(state: int) -> int:
    """The output of SplitMix64 in `state` (any int, taken modulo 2**64): add the golden ratio, then mix."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _prompt_array(request_id: str, prompt: Any) -> np.ndarray:
    """The prompt as a read-only int32[n] copy, or a ValueError that says what is wrong with it."""
    where = f"prompt of request {request_id!r}"
    if isinstance(prompt, (str, bytes)):
        raise ValueError(f"{where} is {type(prompt).__name__}; encode it and pass a sequence of token ids")
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a sequence of token ids: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{where} has shape {array.shape}; pass a one-dimensional sequence of token ids")
    if not array.size:
        raise ValueError(f"{where} is empty; at least 1 token is needed to predict the next")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where} holds {array.dtype} values; token ids are integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise ValueError(f"{where} holds token id {low if low < 0 else high}; ids lie in [0, {2**31})")
    tokens = array.astype(np.int32)  # always a copy: the caller may go on changing its own array
    tokens.flags.writeable = False
    return tokens
