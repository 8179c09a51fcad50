"""The log of an engine over several processes, in a store of this process: what arrives, is deleted, fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.distributed import global_state

from jaxvllm import ModelConfig, RequestOutputKind, SamplingParams, distributed
from jaxvllm.config import ConfigError, EngineConfig
from jaxvllm.distributed import Alone, Follower, Leader
from jaxvllm.following import params_of, plain_params
from jaxvllm.startup import join_group
from tests.device.support import make_engine

SHAPE = ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1, head_dim=8)  # fmt: skip
FACTS = {"num_blocks": 96, "seed": 0}


class Store:
    """What the coordination service's client does, for threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self._changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_set(self, key: str, value: str) -> None:
        self.key_value_set_bytes(key, value.encode())

    def key_value_increment(self, key: str, step: int) -> int:
        with self._changed:
            number = int(self.values.get(key, b"0")) + step
            self.values[key] = str(number).encode()
            return number

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(distributed, "CLOSE_SECONDS", 0.5)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread of its own: their results, or the errors that they ended with."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it waits for ever"
    return results


def group(store: Store, count: int = 2, facts: list[dict[str, Any]] | None = None) -> list[Any]:
    """The leader and its followers, or the errors that they got."""
    processes = [3 * i + 1 for i in range(count)]  # numbers of no meaning

    def make(i: int) -> Any:
        mine = FACTS if facts is None else facts[i]
        return (Follower if i else Leader)(store, processes[i], processes, "here/", mine)

    return at_once(*(lambda i=i: make(i) for i in range(count)))


def test_followers_read_all_operations_in_order_and_what_is_read_is_deleted() -> None:
    store = Store()
    leader, *followers = group(store, 3)
    plan = np.arange(5, dtype=np.int32)

    def lead() -> int:
        most = 0
        for number in range(300):
            if number % 7 == 0:
                leader.note("add", f"request-{number}", [1, 2, number])
            leader.tell_step(number, max(0, number - 1))  # one step ahead
            leader.saw(plan + number)
            while len(read[0]) < number or len(read[1]) < number:  # a step's tokens need all devices
                time.sleep(1e-5)
            most = max(most, len(store.values))
        leader.close()
        return most

    read: list[list[int]] = [[], []]

    def follow(i: int) -> list[Any]:
        seen = []
        for name, *arguments in followers[i].operations():
            seen.append((name, *arguments))
            if name == "step":
                followers[i].saw(plan + len(read[i]))
                read[i].append(len(read[i]))
        return seen

    most, *seen = at_once(lead, lambda: follow(0), lambda: follow(1))
    expected = []
    for number in range(300):
        expected += [("add", f"request-{number}", [1, 2, number])] if number % 7 == 0 else []
        expected += [("step",)]
    assert seen == [expected, expected]
    assert most < 3 * distributed.KEYS_AT_ONCE
    assert store.values == {}


def test_all_agree_on_the_least() -> None:
    leader, *followers = group(Store(), 3)
    members = [leader, *followers]
    for values in ([5, 3, 4], [-7, -9, -8]):
        assert (
            at_once(*(lambda m=m, v=v: m.smallest(v) for m, v in zip(members, values, strict=True)))
            == [min(values)] * 3
        )


def test_engines_that_differ_are_an_error_everywhere() -> None:
    errors = group(Store(), 2, [FACTS, FACTS | {"num_blocks": 95}])
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert "num_blocks=96 here and 95 in process 4: make them with equal options" in str(errors[0])
    assert "num_blocks=95 here and 96 in process 1" in str(errors[1])


def test_a_process_that_never_comes_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "START_SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"process 1 waited 0.05 s for 'facts/4'.*all of processes \[1, 4\]"):
        Leader(Store(), 1, [1, 4], "here/", FACTS)


def test_a_leader_that_fails_ends_those_who_read_and_those_who_wait() -> None:
    leader, reading, waiting = group(Store(), 3)
    never = SimpleNamespace(is_ready=lambda: False)

    def lead() -> None:
        leader.tell_step(0, 0)
        leader.fail("out of memory")
        leader.fail("and again")

    errors = at_once(lead, lambda: list(reading.operations()), lambda: waiting.wait(never))[1:]
    assert [str(error) for error in errors] == ["the engine of another process stopped: process 1: out of memory"] * 2
    leader.close()


def test_a_follower_that_fails_or_leaves_ends_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "CLOSE_SECONDS", 600)
    never = SimpleNamespace(is_ready=lambda: False)
    for leave in (lambda one: one.fail("no disk"), lambda one: one.close()):
        leader, follower = group(Store())
        leave(follower)
        with pytest.raises(RuntimeError, match=r"another process stopped: process 4: (no disk|its engine was closed)"):
            leader.wait(never)
        with pytest.raises(RuntimeError, match="process 4"):
            leader._get("agree/0/4", 5)
        unaware, follower = group(Store())
        leave(follower)
        assert at_once(leader.close, unaware.close) == [None, None]  # wait for nobody


def test_a_follower_that_waits_for_a_message_can_be_interrupted() -> None:
    _, follower = group(Store())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(follower.operations(interrupt))


def test_a_follower_that_waits_for_a_message_hears_of_another_ones_failure() -> None:
    _, failing, waiting = group(Store(), 3)
    failing.fail(KeyboardInterrupt())
    (error,) = at_once(lambda: list(waiting.operations()))
    assert str(error) == "the engine of another process stopped: process 4: KeyboardInterrupt"


def test_a_message_that_cannot_be_sent_ends_the_others_too() -> None:
    leader, follower = group(Store())
    leader.note("add", object())
    with pytest.raises(TypeError) as error:
        leader.tell_step(0, 0)
    leader.fail(error.value)
    (seen,) = at_once(lambda: list(follower.operations()))
    assert "process 1: Object of type object is not JSON serializable" in str(seen)


def test_meshes_of_another_order_or_size_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, store = threading.local(), Store()
    monkeypatch.setattr(jax, "process_index", lambda: here.process)
    monkeypatch.setattr(global_state, "client", store)
    devices = [SimpleNamespace(id=i, process_index=i % 2) for i in range(4)]

    def join(process: int, mine: list[Any]) -> Any:
        here.process = process
        local = [device for device in mine if device.process_index == process]
        mesh: Any = SimpleNamespace(devices=np.array(mine, object), local_devices=local)
        return join_group(mesh, SHAPE, EngineConfig(), ())

    for other in (devices[1::-1], devices):
        errors = at_once(lambda: join(0, devices[:2]), lambda other=other: join(1, other))
        assert [type(error) for error in errors] == [ConfigError] * 2
        ids = [device.id for device in other]
        assert f"devices of the mesh=[0, 1] here and {ids} in process 1" in str(errors[0])
    assert not [key for key in store.values if "/open/" in key]  # others may be made now


class Told(Alone):
    """A group in which another process has failed: nothing but arrays of numpy will ever be there."""

    is_alone = False

    def __init__(self) -> None:
        self.failures: list[str] = []

    def wait(self, array: Any) -> None:
        if isinstance(array, str):
            raise RuntimeError("the engine of another process stopped")

    def fail(self, error: object) -> None:
        self.failures.append(str(error))


def test_scores_and_prompt_logprobs_wait_for_no_process_that_failed() -> None:
    def refuse(*args: Any) -> None:
        raise MemoryError("no room")

    wish = SamplingParams(prompt_logprobs=1, max_tokens=1)
    for name, function, ask in (
        ("score", refuse, lambda engine: engine.score([1, 2])),
        ("score", lambda *args: "on its way", lambda engine: engine.score([1, 2])),
        ("prompt_logprobs", lambda *args: ("on", "its way"), lambda engine: engine.generate([[1, 2]], wish)),
    ):
        with make_engine(warmup=False) as engine:
            told = engine._group = Told()
            setattr(engine._executor, name, function)
            with pytest.raises((MemoryError, RuntimeError)) as error:
                ask(engine)
            assert told.failures == [str(error.value)]
            with pytest.raises(RuntimeError, match="the engine stopped at an earlier error: "):
                engine.score([1, 2])


def test_a_schedule_that_differs_is_noticed_before_its_next_step() -> None:
    leader, follower = group(Store())
    leader.tell_step(0, 0)
    leader.saw(np.arange(3))
    leader.tell_step(1, 0)
    operations = follower.operations()
    assert next(operations) == ["step"]
    follower.saw(np.arange(4))
    with pytest.raises(RuntimeError, match="process 4 follows process 1, but its schedule is another one before mes"):
        next(operations)


def test_a_leader_waits_so_long_for_those_who_do_not_read() -> None:
    store = Store()
    leader, follower = group(store)
    leader.close()
    assert store.values  # the follower still has to read "stop"
    assert list(follower.operations()) == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.1 + 0.2, seed=2**64 - 1, stop=("a", "ü\n"), stop_token_ids=[3, 5], n=3),
        SamplingParams(logit_bias={7: -1.5, 0: 1e-30}, bad_words=["no", (1, 2)], allowed_token_ids=[0, 9]),
        SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=None, top_p=0.3, logprobs=0, ignore_eos=True),
    ],
)
def test_sampling_params_arrive_as_they_were(params: SamplingParams) -> None:
    import json

    assert params_of(json.loads(json.dumps(plain_params(params)))) == params
