"""AsyncEngine: many coroutines, slow consumers, cancellation, limits, errors; nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from jaxvllm import AsyncEngine, Engine, RequestOutputKind, SamplingParams
from tests.device.support import make_engine, random_prompts, sampled, tokens_of

PROMPTS = random_prompts(6, seed=1, high=20)
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with make_engine(warmup=False) as engine:
        yield engine


def check_empty(llm: Engine) -> None:
    llm._scheduler.check_integrity()
    assert llm.stats()["blocks_free"] == llm.stats()["num_blocks"]
    assert not llm._tracked and not llm._completions and not llm.has_unfinished_requests()


async def collect(served: AsyncEngine, prompt: Any, params: SamplingParams, pause: float = 0) -> list[Any]:
    outputs = []
    async for output in served.generate(prompt, params):
        outputs.append(output)
        if pause:
            await asyncio.sleep(pause)
    return outputs


def test_many_coroutines_get_the_tokens_of_generate(llm: Engine) -> None:
    params = sampled(6)
    expected = tokens_of(llm, PROMPTS, params)

    async def main() -> None:
        async with AsyncEngine(llm) as served:
            found = await asyncio.gather(*map(collect, [served] * 6, PROMPTS, params))
            assert [outputs[-1].token_ids for outputs in found] == expected
            assert all(len(outputs) > 1 for outputs in found)
            assert served.stats()["num_running"] == 0 and served.stats()["steps"] == llm.stats()["steps"] > 0

    asyncio.run(main())
    check_empty(llm)


def test_a_slow_consumer_of_deltas_misses_nothing(llm: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    expected = tokens_of(llm, PROMPTS[:1], [params])[0]

    async def main() -> None:
        async with AsyncEngine(llm) as served:
            slow, quick = await asyncio.gather(
                collect(served, PROMPTS[0], params, 0.05), collect(served, PROMPTS[0], params)
            )
            for outputs in (slow, quick):
                assert [token for output in outputs for token in output.token_ids] == expected
            assert len(slow) < 40  # several were merged

    asyncio.run(main())


def test_closing_and_cancelling_free_at_once(llm: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as served:
            iterator = served.generate(PROMPTS[0], LONG, request_id="mine")
            await anext(iterator)
            assert llm.stats()["blocks_free"] < llm.stats()["num_blocks"]
            with pytest.raises(ValueError, match="'mine' is in use"):
                await anext(served.generate(PROMPTS[0], LONG, request_id="mine"))
            await iterator.aclose()  # type: ignore[attr-defined]
            check_empty(llm)
            task = asyncio.create_task(collect(served, PROMPTS[1], LONG))
            while not llm.has_unfinished_requests():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            check_empty(llm)
            assert served._num_unfinished == 0

    asyncio.run(main())


def test_abort_ends_the_iterator(llm: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(llm) as served:
            outputs = []
            async for output in served.generate(PROMPTS[0], LONG, request_id="one"):
                outputs.append(output)
                if len(outputs) == 1:
                    await served.abort("one")
                    await served.abort("nobody")
            assert outputs[-1].outputs[0].finish_reason == "abort"

    asyncio.run(main())
    check_empty(llm)


def test_whoever_gives_up_on_an_abort_harms_nobody(llm: Engine) -> None:
    """Of an unknown id, of a running request, before the thread has seen it and while it works."""

    async def first(served: AsyncEngine, name: str) -> None:
        await anext(served.generate(PROMPTS[1], LONG, request_id=name))

    async def main() -> None:
        async with asyncio.timeout(60), AsyncEngine(llm) as served:
            other = asyncio.create_task(collect(served, PROMPTS[0], LONG))
            for number in range(16):
                name = f"victim-{number}"
                victim = asyncio.create_task(first(served, name))
                aborts = [asyncio.create_task(served.abort(one)) for one in (name, "unknown") * 2]
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                for abort in aborts:
                    abort.cancel()
                await asyncio.gather(*aborts, return_exceptions=True)
                victim.cancel()
                await asyncio.gather(victim, return_exceptions=True)
            assert len((await other)[-1].token_ids) == 90

    asyncio.run(main())
    check_empty(llm)


def test_two_may_not_drive_one_engine(llm: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(llm):
            with pytest.raises(RuntimeError, match="another AsyncEngine drives this engine"):
                AsyncEngine(llm)
        async with AsyncEngine(llm) as served:  # the first one is closed
            assert len((await collect(served, PROMPTS[0], LONG))[-1].token_ids) == 90

    asyncio.run(main())
    check_empty(llm)


def test_no_more_than_max_unfinished_at_a_time(llm: Engine) -> None:
    params = sampled(6, max_tokens=4)
    expected = tokens_of(llm, PROMPTS, params)

    async def main() -> None:
        async with AsyncEngine(llm, max_unfinished=2) as served:
            most = 0

            async def one(i: int) -> list[int]:
                nonlocal most
                outputs = []
                async for output in served.generate(PROMPTS[i], params[i]):
                    most = max(most, len(llm._tracked))
                    outputs.append(output)
                return outputs[-1].token_ids

            waiting = asyncio.create_task(one(5))  # the others come first; this one gives up while it waits
            tasks = [asyncio.create_task(one(i)) for i in range(5)]
            await asyncio.sleep(0)
            waiting.cancel()
            assert await asyncio.gather(*tasks) == expected[:5]
            assert most <= 2
            await asyncio.gather(waiting, return_exceptions=True)
            assert served._num_unfinished == 0 and not served._turns

    asyncio.run(main())
    check_empty(llm)


@pytest.mark.parametrize("freeze_gc", [True, False])
def test_what_is_alive_is_left_out_of_collections(llm: Engine, freeze_gc: bool) -> None:
    async def frozen() -> int:
        async with AsyncEngine(llm, freeze_gc=freeze_gc):
            return gc.get_freeze_count()

    assert (asyncio.run(frozen()) > 10_000) == freeze_gc
    assert gc.get_freeze_count() == 0


def test_loops_of_several_threads(llm: Engine) -> None:
    params = sampled(6)
    expected = tokens_of(llm, PROMPTS, params)
    served = AsyncEngine(llm)
    found: dict[int, list[int]] = {}

    def run(i: int) -> None:
        found[i] = asyncio.run(collect(served, PROMPTS[i], params[i]))[-1].token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(served.close())
    assert [found[i] for i in range(6)] == expected


def test_errors_are_told(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        served = AsyncEngine(llm)
        with pytest.raises(ValueError, match="prompt is empty"):
            await collect(served, [], LONG)
        assert served._num_unfinished == 0
        task = asyncio.create_task(collect(served, PROMPTS[0], LONG))
        await asyncio.sleep(0.05)
        await served.close()
        await served.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await task
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await collect(served, PROMPTS[0], LONG)
        check_empty(llm)

        served = AsyncEngine(llm)
        monkeypatch.setattr(llm, "step", lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="stopped at an error: division by zero"):
            await collect(served, PROMPTS[0], LONG)
        await served.close()

    asyncio.run(main())
    monkeypatch.undo()
    check_empty(llm)
    with pytest.raises(ValueError, match="max_unfinished=0"):
        AsyncEngine(llm, max_unfinished=0)
    with pytest.raises(ValueError, match="block_size: give them to the Engine"):
        AsyncEngine(llm, block_size=4)
