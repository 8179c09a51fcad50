"""Requests with random parameters, ends and aborts, all through one engine: nothing leaks, nothing compiles, and each
one drawn by lot gets the tokens and the text of its solo run.

The small run is part of the suite, the one of 10,000 requests is `make test-slow`. A seeded draw fixes everything but
the times at which aborts meet the steps in flight.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxvllm import SamplingParams
from tests.device.processor_reference import random_params
from tests.device.support import KJV, KJV_SHAPES, make_engine

VOCAB = 3072
TEXTS = ("And the king said", "In the beginning God created", "Blessed is the man that walketh not in", "the", "Lo, ")


def random_wish(rng: np.random.Generator, number: int) -> SamplingParams:
    """As processor_reference's, with ends of every kind; one in four needs no processors."""
    chosen: dict[str, Any] = {"max_tokens": int(rng.integers(1, 13)), "ignore_eos": bool(rng.random() < 0.3)}
    if rng.random() < 0.8:
        chosen["seed"] = number
    if rng.random() < 0.3:
        chosen["stop"] = [["e", " of", ", and"][rng.integers(3)], "th"]
        chosen["include_stop_str_in_output"] = bool(rng.random() < 0.5)
    if rng.random() < 0.2:
        chosen["stop_token_ids"] = rng.integers(0, VOCAB, 200).tolist()
    if rng.random() < 0.2:
        chosen["logprobs"] = int(rng.integers(0, 4))
    params = random_params(rng, VOCAB)[0] if rng.random() < 0.75 else SamplingParams(temperature=0.9)
    chosen["min_tokens"] = min(params.min_tokens, chosen["max_tokens"])
    if params.temperature > 0 and rng.random() < 0.1:
        chosen["n"] = int(rng.integers(2, 4))
    return replace(params, **chosen)


def random_prompt(rng: np.random.Generator) -> Any:
    if rng.random() < 0.3:
        return TEXTS[rng.integers(len(TEXTS))]
    shared = list(range(100, 140))[: rng.integers(0, 41)]  # beginnings that the prefix cache can find
    return shared + rng.integers(0, VOCAB, rng.integers(1, 50)).tolist()


def run(total: int, num_solos: int, seed: int, decode_buckets: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    started = time.perf_counter()
    with make_engine(KJV, scheduling_policy="running_first", decode_buckets=decode_buckets, **KJV_SHAPES) as llm:
        asked: dict[str, tuple[Any, SamplingParams]] = {}
        ended: dict[str, Any] = {}
        while len(ended) < total:
            while len(asked) < total and len(asked) - len(ended) < 30:
                prompt, wish = random_prompt(rng), random_wish(rng, len(asked))
                asked[llm.add_request(prompt, wish)] = (prompt, wish)
            ended |= {output.request_id: output for output in llm.step() if output.finished}
            if rng.random() < 0.05:
                recent = list(asked)[-30:]  # most of them unfinished
                llm.abort_request(recent[int(rng.integers(len(recent)))])
        llm._scheduler.check_integrity()
        stats = llm.stats()
        assert stats["blocks_free"] == stats["num_blocks"] and stats["compiles_after_warmup"] == 0
        assert not llm._tracked and not llm._completions and not llm._num_watched
        seeded = [name for name, (_, wish) in asked.items() if wish.seed is not None]
        for name in rng.choice(seeded, min(num_solos, len(seeded)), replace=False).tolist():
            prompt, wish = asked[name]
            solo = llm.generate([prompt], wish, use_tqdm=False)[0]
            for one, other in zip(solo.outputs, ended[name].outputs, strict=True):
                if other.finish_reason == "abort":
                    assert one.token_ids[: len(other.token_ids)] == other.token_ids
                    continue
                assert (one.token_ids, one.text) == (other.token_ids, other.text), (name, wish)
                assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
                assert len(one.logprobs or ()) == (0 if wish.logprobs is None else len(one.token_ids))
        stats = llm.stats()
        assert stats["blocks_free"] == stats["num_blocks"] and stats["compiles_after_warmup"] == 0
    reasons = [one.finish_reason for output in ended.values() for one in output.outputs]
    result = {reason: reasons.count(reason) for reason in ("stop", "length", "abort")}
    return result | {"requests": total, "solos": num_solos, "preemptions": stats["preemptions"],
                     "steps": stats["steps"], "seconds": round(time.perf_counter() - started)}  # fmt: skip


def test_sixty_random_requests() -> None:
    result = run(60, 10, seed=1, decode_buckets=(8,))
    assert min(result["stop"], result["length"], result["abort"], result["preemptions"]) > 0


@pytest.mark.slow
def test_ten_thousand_random_requests(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(10_000, 300, seed=2, decode_buckets=(4, 8))
    with capsys.disabled():
        print(f"\n{result}")
    assert min(result["stop"], result["length"], result["abort"], result["preemptions"]) > 100
