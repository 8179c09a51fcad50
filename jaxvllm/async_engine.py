"""AsyncEngine: an engine for asyncio programs. One thread runs the steps; coroutines wait for their outputs.

    coroutine --command--> [ thread: commands, step, commands, step, ... ] --outputs--> one mailbox a request

Owns: the thread, what crosses between it and event loops, and how much may wait. Must not know: how steps are run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

from jaxvllm.engine import Engine
from jaxvllm.outputs import CompletionOutput, RequestOutput
from jaxvllm.sampling_params import RequestOutputKind, SamplingParams


class AsyncEngine:
    """Serves requests of coroutines, of one event loop or of several in different threads.

    engine: an Engine that no other AsyncEngine drives, or what ``Engine`` takes first, with its keywords in
        ``options``; in the latter case ``close`` closes it, too.
    max_unfinished: requests that may wait or run at the same time. Further ones wait in ``generate``, in order.
    freeze_gc: what is alive now (modules, compiled steps) is left out of garbage collections, in the whole process,
        until ``close``: a full one took up to 90 ms with an engine, and every request waits for it.

    A consumer that is slower than its request never holds up others: what it hasn't taken yet is one output, into
    which later ones are merged.
    """

    def __init__(self, engine: Engine | Any, *, max_unfinished: int = 4096, freeze_gc: bool = True, **options: Any
                 ) -> None:  # fmt: skip
        if isinstance(max_unfinished, bool) or not isinstance(max_unfinished, int) or max_unfinished < 1:
            raise ValueError(f"max_unfinished={max_unfinished!r} must be a whole number of at least 1")
        if isinstance(engine, Engine) and options:
            raise ValueError(f"{', '.join(options)}: give them to the Engine, which is made already")
        self._owned = not isinstance(engine, Engine)
        self.engine: Engine = engine if isinstance(engine, Engine) else Engine(engine, **options)
        if self.engine.driver is not None:
            raise RuntimeError("another AsyncEngine drives this engine: send requests to that one, or close it first")
        self.engine.driver = self
        self.max_unfinished = max_unfinished
        self._frozen = freeze_gc
        if freeze_gc:
            gc.collect()
            gc.freeze()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._boxes: dict[str, _Mailbox] = {}
        self._turns: deque[Future[None]] = deque()  # of those that wait for max_unfinished
        self._num_unfinished = 0
        self._ids = itertools.count()
        self._closing = False
        self._error: BaseException | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jaxvllm-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Any, sampling_params: SamplingParams | None = None, *,
                       request_id: str | None = None, priority: int = 0) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """Outputs of one prompt as its tokens come; DELTA and FINAL_ONLY as ``sampling_params.output_kind`` says.

        Closing the iterator, or cancelling the task that waits in it, aborts the request; its blocks are free before
        ``aclose`` returns. Raises ValueError for what can't be served, RuntimeError once the engine is closed.
        """
        await self._take_turn()
        try:
            name = f"async-{next(self._ids)}" if request_id is None else request_id
            delta = getattr(sampling_params, "output_kind", None) is RequestOutputKind.DELTA
            box = _Mailbox(asyncio.get_running_loop(), delta)
            added = self._submit(lambda: self._add(prompt, sampling_params, name, priority, box))
            try:
                await asyncio.wrap_future(added)
                while True:
                    output = await box.take()
                    yield output
                    if output.finished:
                        return
            finally:
                if not box.finished:
                    with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile: it has forgotten all
                        await asyncio.wrap_future(self._submit(lambda: self._forget(name, box)))
        finally:
            self._give_turn()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gives one more output, with finish_reason "abort". Unknown ids: a no-op."""
        await asyncio.wrap_future(self._submit(lambda: self.engine.abort_request(request_id)))

    def stats(self) -> dict[str, Any]:
        """``Engine.stats``: counters, from any thread and at any time."""
        return self.engine.stats()

    async def close(self) -> None:
        """Aborts what is unfinished and ends the thread; an engine that was made here is closed. Twice is once."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        await asyncio.to_thread(self._thread.join)
        self.engine.driver = None
        if self._frozen:
            self._frozen = False
            gc.unfreeze()
        if self._owned:
            self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Turns

    async def _take_turn(self) -> None:
        turn: Future[None] = Future()
        with self._news:
            if self._num_unfinished < self.max_unfinished:
                self._num_unfinished += 1
                return
            self._turns.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            with self._news:
                waiting = turn in self._turns
                if waiting:
                    self._turns.remove(turn)
            if not waiting and not turn.cancelled():
                self._give_turn()  # it came too late
            raise

    def _give_turn(self) -> None:
        with self._news:
            while self._turns:
                turn = self._turns.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._num_unfinished -= 1

    # Commands, run by the thread between two steps

    def _submit(self, command: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # whoever stops waiting for it can't cancel it: the thread will answer
        with self._news:
            if self._closing or self._error is not None:
                done.set_exception(RuntimeError(self._why()))
            else:
                self._commands.append((command, done))
                self._news.notify_all()
        return done

    def _why(self) -> str:
        return "the engine is closed" if self._error is None else f"the engine stopped at an error: {self._error}"

    def _add(self, prompt: Any, params: SamplingParams | None, name: str, priority: int, box: _Mailbox) -> None:
        self.engine.add_request(prompt, params, request_id=name, priority=priority)
        self._boxes[name] = box

    def _forget(self, name: str, box: _Mailbox) -> None:
        if self._boxes.get(name) is box:
            del self._boxes[name]
            self.engine.forget_request(name)

    def _run(self) -> None:
        try:
            while self._work():
                for output in self.engine.step():
                    box = self._boxes.get(output.request_id)
                    if box is not None:
                        if output.finished:
                            del self._boxes[output.request_id]
                        box.put(output)
        except BaseException as error:  # whatever ended the loop: everybody who waits must hear of it
            self._error = error
        with self._news:
            self._closing, commands = True, list(self._commands)
            self._commands.clear()
        for _, done in commands:
            done.set_exception(RuntimeError(self._why()))
        for name, box in self._boxes.items():
            self.engine.forget_request(name)
            box.fail(RuntimeError(self._why()))
        self._boxes.clear()

    def _work(self) -> bool:
        """Runs the commands that have come, waiting for some while there is nothing to step; False: the end."""
        while True:
            with self._news:
                while not (self._commands or self._closing or self.engine.has_unfinished_requests()):
                    self._news.wait()
                if self._closing:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command, done in commands:
                try:
                    done.set_result(command())
                except Exception as error:  # the caller's mistake: it is told, others go on
                    done.set_exception(error)
            if self.engine.has_unfinished_requests():
                return True


class _Mailbox:
    """What a request's consumer hasn't taken yet: at most one output, on the consumer's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delta: bool) -> None:
        self._loop, self._delta = loop, delta
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self.finished = False

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            pending = self._output if self._delta else None
            self._output = output if pending is None else merged(pending, output)
            self.finished = output.finished
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error, self.finished = error, True
        self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> RequestOutput:
        while True:
            with self._lock:
                output, self._output = self._output, None
            if output is not None:
                return output
            if self._error is not None:
                raise self._error
            await self._arrived.wait()
            self._arrived.clear()


def merged(first: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two deltas of one request, one after the other, as one."""
    outputs = [_joined(one, two) for one, two in zip(first.outputs, later.outputs, strict=True)]
    return replace(later, outputs=outputs)


def _joined(first: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = None if later.logprobs is None else [*(first.logprobs or ()), *later.logprobs]
    return replace(later, text=first.text + later.text, token_ids=first.token_ids + later.token_ids, logprobs=logprobs)
