"""Ctrl-C at any bytecode, several threads, failures: what the engine's books must survive."""

from __future__ import annotations

import contextlib
import dis
import functools
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import Engine, SamplingParams
from jaxvllm.config import ConfigError, ModelConfig
from jaxvllm.runtime.executor import StepHandle
from tests.device.support import MODEL, make_engine, sampled, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9]]
ROOT = str(Path(__file__).parents[2])
NUM_PLACES = 100  # where Ctrl-C comes, of several hundreds


class InterruptAt:
    """SIGINT at check number ``at`` that the project's own files execute inside the block; at 0 notes their places."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.places: list[tuple[CodeType, int]] = []
        self._checked: dict[FrameType, bool] = {}  # whether the operation before was one that CPython checks after

    def __enter__(self) -> InterruptAt:
        sys._getframe(1).f_trace_opcodes = True  # Python 3.12 sends opcode events only if some frame wants them
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        checks, checked = checks_of(frame.f_code), self._checked

        def opcode(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                before = checked.get(frame, False)
                checked[frame] = checks[frame.f_lasti]
                if before:
                    self.count += 1
                    if self.at == 0:
                        self.places.append((frame.f_code, frame.f_lasti))
                    elif self.count == self.at:
                        sys.settrace(None)
                        signal.raise_signal(signal.SIGINT)
            elif event == "return":
                checked.pop(frame, None)
            return opcode

        return opcode


@functools.cache
def is_ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(ROOT) and os.sep + "tests" + os.sep not in name


@functools.cache
def checks_of(code: CodeType) -> list[bool]:
    """Of each place in a function's code: whether it's an operation after which CPython runs signal handlers."""
    return [dis.opname[byte].startswith(("CALL", "JUMP_BACKWARD", "RESUME")) for byte in code.co_code]


@pytest.fixture(scope="module")
def llm():
    # runs hundreds of steps, and one costs what its bucket holds: no more tokens than the longest prompt here has
    with make_engine(pool=12, rows=2, max_num_batched_tokens=32, many_steps=True, warmup=False) as engine:
        yield engine


def assert_nothing_left(llm: Engine) -> None:
    llm._scheduler.check_integrity()
    assert llm.stats()["blocks_free"] == llm.stats()["num_blocks"]
    assert (
        not llm._scheduler.requests
        and not llm._tracked
        and not llm._changed
        and not llm._num_watched
        and not llm._completions
    )


def every(call: Any, number: int) -> list[int]:
    """At most ``number`` of the places in the code that ``call`` comes through, each at one of its times."""
    with InterruptAt(0) as noted:
        call()
    times: dict[tuple[CodeType, int], list[int]] = {}
    for at, place in enumerate(noted.places, 1):
        times.setdefault(place, []).append(at)
    draw = random.Random(0)
    chosen = sorted(draw.choice(found) for found in times.values())
    return chosen[:: -(-len(chosen) // number)]


def test_ctrl_c_anywhere_in_generate(llm: Engine) -> None:
    expected = tokens_of(llm, PROMPTS, [GREEDY] * 3)
    for at in every(lambda: tokens_of(llm, PROMPTS, [GREEDY] * 3), NUM_PLACES):
        with contextlib.suppress(KeyboardInterrupt), InterruptAt(at):
            tokens_of(llm, PROMPTS, [GREEDY] * 3)
        assert_nothing_left(llm)
    assert tokens_of(llm, PROMPTS, [GREEDY] * 3) == expected


def test_ctrl_c_anywhere_in_score(llm: Engine) -> None:
    ids = list(range(30))
    expected = llm.score(ids)
    for at in every(lambda: llm.score(ids), NUM_PLACES):
        with contextlib.suppress(KeyboardInterrupt), InterruptAt(at):
            llm.score(ids)
        assert_nothing_left(llm)
        np.testing.assert_array_equal(llm.score(ids), expected)


def test_ctrl_c_anywhere_in_step(llm: Engine) -> None:
    expected = tokens_of(llm, PROMPTS, [GREEDY] * 3)

    def drive(outputs: dict[str, Any]) -> None:
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}

    def whole() -> None:
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        drive({})

    for at in every(whole, NUM_PLACES):
        outputs: dict[str, Any] = {}
        with contextlib.suppress(KeyboardInterrupt), InterruptAt(at):
            for prompt in PROMPTS:
                llm.add_request(prompt, GREEDY)
            drive(outputs)
        drive(outputs)
        for output in outputs.values():
            # (one that comes while step() returns loses that answer, as between `return` and `=` in any function)
            assert output.token_ids == expected[PROMPTS.index(output.prompt_token_ids)][: len(output.token_ids)]
        assert_nothing_left(llm)


def test_threads_wait_for_each_other(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = sampled(3, max_tokens=8)
    expected = tokens_of(llm, PROMPTS, params)
    together = threading.Barrier(2)
    result = StepHandle.result

    def slow(handle: StepHandle) -> np.ndarray:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # both threads at the same step, if the engine lets them
        return result(handle)

    monkeypatch.setattr(StepHandle, "result", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(tokens_of(llm, PROMPTS, params))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_close_after_an_error_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(warmup=False)
    arrays = jax.tree.leaves((engine._executor.params, engine._executor.state))

    def lost(*args: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._executor, "dispatch", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.generate([[1]], GREEDY, use_tqdm=False)
    engine.close()
    assert all(array.is_deleted() for array in arrays)
    with pytest.raises(RuntimeError, match="earlier error: device lost"):
        engine.step()


def test_an_id_taken_again_gets_no_news_of_its_former_owner() -> None:
    forever = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make_engine(async_steps=3, warmup=False) as engine:
        for name in ("a", "other"):
            engine.add_request([1, 2, 3], forever, request_id=name)
        for _ in range(6):
            engine.step()
        engine.abort_request("a")
        assert any(output.finished for output in engine.step())
        assert [output.request_id for output in engine.step()] == ["other"]  # a late token finds nobody
        engine.add_request([7] * 40, forever, request_id="a")
        for _ in range(6):
            assert all(output.token_ids for output in engine.step())


def test_tokens_cached_before_an_admission(llm: Engine) -> None:
    llm.abort_request(llm.add_request([1], GREEDY))
    assert [output.num_cached_tokens for output in llm.step()] == [None]


@pytest.mark.parametrize("request_id", [5, [1], b"x", ("a",)])
def test_request_ids_are_strings(llm: Engine, request_id: Any) -> None:
    with pytest.raises(ValueError, match="request_id="):
        llm.add_request([1], GREEDY, request_id=request_id)


@pytest.mark.parametrize("prompt", [np.array(5), [{1, 2}], [bytearray(b"ab")], [memoryview(b"ab")]])
def test_more_bad_prompts(llm: Engine, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompts"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_deleted_arrays_are_named(llm: Engine) -> None:
    gone = jax.numpy.array([1, 2])
    gone.delete()
    with pytest.raises(ValueError, match=r"prompt.*deleted"):
        llm.generate(gone, GREEDY, use_tqdm=False)


def test_a_temperature_beyond_every_float() -> None:
    with pytest.raises(ValueError, match="temperature=inf"):
        SamplingParams(temperature=10**400)


@pytest.mark.parametrize("eos", ["12", "x", [None], 2.0, [[1]], -1, True])
def test_end_tokens_are_ids(eos: Any) -> None:
    """The text "12" ended every sequence at ids 1 and 2."""
    model = ModelConfig.from_dir(MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    with pytest.raises(ConfigError, match="eos_token_id="):
        type(model).from_dict(config | {"eos_token_id": eos})
