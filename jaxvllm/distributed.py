r"""Engines whose devices belong to several processes: how the one that leads tells the others what it does.

Every process runs the same scheduler. The lowest one of the mesh leads: callers speak to it alone. What they change
goes into a log of numbered messages, one before each step; the others read it, do the same, and so dispatch the same
steps. Nothing of it depends on a clock.

    leader    add, add, step 0 | step 1 | abort, step 2 | ... | stop
              \___ message 0 __/ \_  1 _/ \_ message 2 _/         each comes before its step's dispatch

The log lies in the key-value store of ``jax.distributed``'s coordination service, on the host: no device takes part,
and a message may come while steps are in flight. Where a process fails it says so under one more key, which the others
look at while they wait; a process that dies is noticed by the service's heartbeats.

Owns: the log, agreement at the start, how long anybody waits. Must not know: what the operations in a message mean.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jaxvllm.config import ConfigError

START_SECONDS = 600.0  # how long a process waits for another one's start: weights may come from a slow disk
LOOK_SECONDS = 1.0  # how often one that waits looks whether another one has failed
CLOSE_SECONDS = 10.0  # how long close() waits for the others to have read it
PAUSE_SECONDS = 1e-4  # between two looks at a step that isn't done
KEYS_AT_ONCE = 64  # messages that are deleted together


class Alone:
    """All devices are this process's own: nothing to tell anybody."""

    follows = False
    is_alone = True
    who = ""

    def note(self, name: str, *arguments: Any) -> None:
        """One more operation for the next message: a name and plain values."""

    def tell(self, name: str, *arguments: Any) -> None:
        """As ``note``, and sends the message."""

    def tell_step(self, scheduled: int, oldest: int) -> None:
        """A step comes. scheduled: steps so far; oldest: number of the first one whose tokens weren't read yet."""

    def saw(self, plan: np.ndarray) -> None:
        """``plan`` is dispatched; the processes compare theirs."""

    def wait(self, array: Any) -> None:
        """Returns when a replicated array is there. RuntimeError where another process has failed meanwhile."""

    def smallest(self, value: int) -> int:
        """The least of all processes' values. Each process calls it equally often, in the same order."""
        return value

    def fail(self, error: object) -> None:
        """This process's engine stopped at an error; once is enough."""

    def close(self) -> None:
        """The engine's end; twice is once."""


class Group(Alone):
    """What leader and followers share: the store, and waiting in it.

    client: of the store. me: this process. processes: all that share the engine, in order; the first one leads. place:
    the engine's own prefix of keys. facts: what must be the same everywhere, as plain values. held: keys that are
    deleted at this process's end of the engine. ConfigError where facts differ, or where another process doesn't come.
    """

    is_alone = False

    def __init__(self, client: Any, me: int, processes: Sequence[int], place: str, facts: Mapping[str, Any],
                 held: Sequence[str] = ()) -> None:  # fmt: skip
        self._held = list(held)
        self._client, self._me, self._all, self._root = client, me, processes, place
        self._leader, self._others = processes[0], processes[1:]
        self._digest = self._number = self._num_agreed = 0
        self._failed = self._ended = False
        self.who = f"process {self._me} follows process {self._leader}"
        try:
            self._compare(facts)
        except BaseException:
            self._release()
            raise

    def saw(self, plan: np.ndarray) -> None:
        self._digest = zlib.crc32(plan, self._digest)

    def wait(self, array: Any) -> None:
        looked = time.monotonic()
        while not array.is_ready():
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - looked > LOOK_SECONDS:
                self._raise_if_failed()
                looked = time.monotonic()

    def smallest(self, value: int) -> int:
        place = f"agree/{self._num_agreed}/"
        self._num_agreed += 1
        if self._me != self._leader:
            self._set(f"{place}{self._me}", value)
            return int(self._get(f"{place}all", START_SECONDS))
        least = min([value, *(int(self._get(f"{place}{other}", START_SECONDS)) for other in self._others)])
        self._set(f"{place}all", least)
        return least

    def fail(self, error: object) -> None:
        if not self._failed:
            self._failed = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one has failed before, or the store is gone
                self._set("failed", f"process {self._me}: {describe(error)}")
            self._release()

    def _release(self) -> None:
        """Other engines may have the devices."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while self._held:
                self._client.key_value_delete(self._held.pop())

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Everybody's facts are the leader's, or everybody gets the same error."""
        mine = {name: json.dumps(value, default=str) for name, value in facts.items()}
        self._set(f"facts/{self._me}", mine)
        for other in self._others if self._me == self._leader else (self._leader,):
            theirs = self._get(f"facts/{other}", START_SECONDS)
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            if names:
                wrong = [f"{name}={mine.get(name)} here and {theirs.get(name)} in process {other}" for name in names]
                raise ConfigError(f"the processes' engines differ: {'; '.join(wrong)}: make them with equal options")

    def _set(self, key: str, value: Any) -> None:
        self._client.key_value_set_bytes(self._root + key, json.dumps(value).encode())

    def _get(self, key: str, seconds: float) -> Any:
        """The value of a key that another process sets."""
        until = time.monotonic() + seconds
        while (value := self._look(key, min(seconds, LOOK_SECONDS))) is None:
            self._raise_if_failed()
            if time.monotonic() > until:
                raise ConfigError(
                    f"process {self._me} waited {seconds:g} s for {key!r} of another process: all of processes "
                    f"{self._all} must make the same Engine at the same place of their programs"
                )
        return value

    def _look(self, key: str, seconds: float) -> Any:
        """A key's value; None when it isn't there after ``seconds``. Other errors (the service is gone) are raised."""
        try:
            value = self._client.blocking_key_value_get_bytes(self._root + key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return json.loads(value)

    def _raise_if_failed(self) -> None:
        try:
            value = self._client.key_value_try_get_bytes(self._root + "failed")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return
        self._raise_failed(json.loads(value))

    def _raise_failed(self, reason: str) -> NoReturn:
        self._failed = True
        self._release()
        raise RuntimeError(f"the engine of another process stopped: {reason}")


class Leader(Group):
    """The process that callers speak to: writes the log."""

    def __init__(self, *args: Any) -> None:
        self._operations: list[list[Any]] = []
        self._unread: deque[tuple[int, int]] = deque()  # (message, number of the step that it announced)
        self._num_deleted = 0  # directories of KEYS_AT_ONCE messages
        super().__init__(*args)

    def note(self, name: str, *arguments: Any) -> None:
        self._operations.append([name, *arguments])

    def tell(self, name: str, *arguments: Any) -> None:
        self.note(name, *arguments)
        self._set(log_key(self._number), self._operations)
        self._number += 1
        self._operations = []

    def tell_step(self, scheduled: int, oldest: int) -> None:
        self._unread.append((self._number, scheduled))
        self.tell("step", self._digest)
        # All devices took part in a step whose tokens are here: so everybody has read what announced it.
        while self._unread and self._unread[0][1] < oldest:
            number, _ = self._unread.popleft()
            if number // KEYS_AT_ONCE > self._num_deleted:
                self._client.key_value_delete(self._root + log_key(self._num_deleted * KEYS_AT_ONCE, folder=True))
                self._num_deleted += 1

    def fail(self, error: object) -> None:
        if not self._failed:
            self._operations = []  # they may be what failed
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.tell("failed", f"process {self._me}: {describe(error)}")
        super().fail(error)

    def close(self) -> None:
        if self._ended or self._failed:
            return
        self._ended = True
        with contextlib.suppress(RuntimeError, ConfigError):  # one has failed, doesn't read it, or the service is gone
            self.tell("stop")
            until = time.monotonic() + CLOSE_SECONDS
            for other in self._others:
                self._get(f"stopped/{other}", max(until - time.monotonic(), 0.01))
            self._client.key_value_delete(self._root)
        self._release()


class Follower(Group):
    """Any other process: reads the log."""

    follows = True

    def operations(self, meanwhile: Callable[[], None] = lambda: None) -> Iterator[list[Any]]:
        """[name, *arguments] of each operation, until the leader closes its engine; the digest of "step" is compared.

        meanwhile: called every LOOK_SECONDS while there is none. RuntimeError where another process has failed, or the
        leader has dispatched something else than this one.
        """
        while not self._ended:
            while (message := self._look(log_key(self._number), LOOK_SECONDS)) is None:
                meanwhile()
                self._raise_if_failed()
            self._number += 1
            for name, *arguments in message:
                if name == "stop":
                    self._ended = True
                    self._release()
                    self._set(f"stopped/{self._me}", True)
                elif name == "failed":
                    self._raise_failed(arguments[0])
                else:
                    if name == "step" and arguments.pop() != self._digest:
                        raise RuntimeError(
                            f"{self.who}, but its schedule is another one before message {self._number - 1}: use the "
                            "same versions of everything in all processes; if they are the same, please report this"
                        )
                    yield [name, *arguments]

    def close(self) -> None:
        if not self._ended:
            self.fail("its engine was closed before the leader's")
        self._ended = True


def at_end(engine: object, group: Alone) -> Callable[[], Any]:
    """Calls ``group.close`` once: when called itself, at the engine's end, or at the program's."""
    end = weakref.finalize(engine, group.close)
    if not group.is_alone:
        # Before jax's own, which ends all processes. finalize's comes later where another one was made before jax's
        # import, by a temporary folder for instance.
        atexit.register(end)
    return end


def describe(error: object) -> str:
    """Its text, or what it is: a KeyboardInterrupt has none."""
    return str(error) or type(error).__name__


def log_key(number: int, *, folder: bool = False) -> str:
    """Where message ``number`` lies, or the folder of those that are deleted with it."""
    place = f"log/{number // KEYS_AT_ONCE}/"
    return place if folder else f"{place}{number}"
