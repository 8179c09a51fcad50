"""What one process of a run over several does: python -m tests.device.several_processes '{"program": ..., ...}'.

Its last line on stdout is a JSON object. ``Processes`` starts them all and ends them in every outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOUND = "found: "  # what the libraries log comes before and after
MODEL = ROOT / "tests" / "golden_data" / "tied_head_dim_differs"
SMALL = {"block_size": 4, "num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64,
         "decode_buckets": (4,), "token_buckets": (32,), "enable_processors": False}  # fmt: skip


class Processes:
    """``count`` processes of ``program``, each with ``devices`` fake devices of the CPU; options go to the program."""

    def __init__(self, program: str, count: int = 2, devices: int = 1, timeout: float = 120, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="jaxvllm-processes-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.until = time.monotonic() + timeout
        self.logs = [Path(self.folder.name) / str(me) for me in range(count)]
        self.processes = []
        for me in range(count):
            task = {"program": program, "me": me, "count": count, "devices": devices, "port": port, **options}
            command = [sys.executable, "-m", "tests.device.several_processes", json.dumps(task)]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            if not options.get("on_gpu"):
                env["JAX_PLATFORMS"] = "cpu"
            with self.logs[me].open("w") as log:
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
                )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()

    def text(self, me: int) -> str:
        return self.logs[me].read_text(errors="replace")

    def status(self, me: int) -> int:
        """Its exit status, or an AssertionError at the time limit, with what all have said."""
        try:
            return self.processes[me].wait(max(self.until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            said = "\n".join(f"--- process {i}\n{self.text(i)[-3000:]}" for i in range(len(self.logs)))
            raise AssertionError(f"process {me} doesn't end:\n{said}") from None

    def result(self, me: int) -> Any:
        """What it found; it must have ended well."""
        assert self.status(me) == 0, self.text(me)[-5000:]
        said = [line for line in self.text(me).splitlines() if line.startswith(FOUND)]
        assert len(said) == 1, self.text(me)[-5000:]
        return json.loads(said[0].removeprefix(FOUND))

    def wait_for(self, me: int, words: str) -> None:
        while words not in self.text(me):
            assert self.processes[me].poll() is None and time.monotonic() < self.until, self.text(me)[-5000:]
            time.sleep(0.05)


# What the leading process asks of its engine; the tests ask the same of an engine of one process.


def serve(engine: Any) -> dict[str, Any]:
    """More requests than rows in a small pool, cached prefixes, aborts, a stream that is given up, a mistake."""
    from jaxvllm import SamplingParams

    def wish(i: int, length: int = 14) -> SamplingParams:
        seed = 100 + i if i % 3 == 1 else None  # every third seeded, every third drawn with the engine's own seed
        return SamplingParams(temperature=0.0 if i % 3 == 0 else 0.9, max_tokens=length, ignore_eos=True, seed=seed)

    prompts = [[(7 * i + 3 * k) % 331 for k in range(3 + 5 * i % 37)] for i in range(9)]
    wishes = [wish(i) for i in range(9)]
    found: dict[str, Any] = {"tokens": [one.token_ids for one in engine.generate(prompts, wishes, use_tqdm=False)]}
    again = engine.generate(prompts[-1:], wishes[:1], use_tqdm=False)[0]
    found["again"] = again.token_ids, again.num_cached_tokens
    try:
        engine.generate([[1] * 100], use_tqdm=False)
    except ValueError as error:
        found["error"] = str(error)

    outputs: dict[str, Any] = {}
    names = [engine.add_request(prompt, wish(i)) for i, prompt in enumerate(prompts[:6])]
    for number in range(200):
        outputs |= {one.request_id: (one.token_ids, one.outputs[0].finish_reason) for one in engine.step()}
        if number == 3:
            engine.abort_request(names[1])
            engine.abort_request(names[5])
            names.append(engine.add_request(prompts[7], wish(7), request_id="late"))
        if number == 5:
            engine.forget_request(names[0])
            engine.reset_prefix_cache()
        if not engine.has_unfinished_requests():
            break
    found["outputs"] = outputs
    stream = engine.stream(prompts[2], wish(2, 30))
    found["stream"] = [next(stream).token_ids for _ in range(3)]
    stream.close()
    found["after"] = [one.token_ids for one in engine.generate(prompts[3:5], wishes[3:5], use_tqdm=False)]
    found["stats"] = counts(engine)
    return found


def processed(engine: Any) -> dict[str, Any]:
    """What takes another compiled function (processors, log-probabilities, scores), stop strings, coroutines."""
    from jaxvllm import AsyncEngine, SamplingParams

    prompts = ["In the beginning", "And the king said unto", "Blessed is the man that", "The LORD"]
    wishes = [
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, prompt_logprobs=1),
        SamplingParams(temperature=0.9, seed=2, max_tokens=40, stop=["e", "o"]),
        SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=2, bad_words=["the"], logit_bias={5: 2.0}),
    ]
    outputs = engine.generate(prompts, wishes, use_tqdm=False)
    numbers = [{str(t): round(one.logprob, 4) for t, one in entry.items()} for entry in outputs[0].outputs[0].logprobs]
    entries = [sorted(entry) for entry in outputs[1].prompt_logprobs[1:]]

    async def asked() -> list[list[int]]:
        async def one(i: int) -> list[int]:
            return [o.token_ids async for o in front.generate(prompts[i], wishes[i])][-1]

        async with AsyncEngine(engine) as front:
            return await asyncio.gather(*map(one, range(3)))

    return {
        "texts": [[o.text for o in output.outputs] for output in outputs], "logprobs": numbers, "prompt": entries,
        "scores": [round(float(score), 3) for score in engine.score("And God said, Let there be light")],
        "async": asyncio.run(asked()), "stats": counts(engine),
    }  # fmt: skip


def counts(engine: Any) -> dict[str, int]:
    """What the schedule made of it."""
    stats = engine.stats()
    names = ("steps", "preemptions", "prefix_hit_tokens", "output_tokens", "aborted_requests", "num_blocks",
             "blocks_free", "compiles_after_warmup")  # fmt: skip
    return {name: stats[name] for name in names}


def main(task: dict[str, Any]) -> None:
    from tests.xla_flags import QUICK

    own: dict[str, Any] = {}  # of jax.distributed.initialize
    folder = tempfile.TemporaryDirectory()  # removed at the end, as in many programs: by a clean-up older than jax's
    if task.get("on_gpu"):
        own["local_device_ids"] = [task["me"]]
    else:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={task['devices']} {QUICK}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo" if task["count"] > 1 else None)
    if task["count"] > 1:
        address = f"127.0.0.1:{task['port']}"
        jax.distributed.initialize(
            address, task["count"], task["me"], coordinator_bind_address=address,
            heartbeat_timeout_seconds=task.get("heartbeat", 100), shutdown_timeout_seconds=30, **own,
        )  # fmt: skip
    found = PROGRAMS[task["program"]](task)
    folder.cleanup()
    print(f"\n{FOUND}{json.dumps(found)}", flush=True)


def run(task: dict[str, Any]) -> Any:
    """The leader serves, the others follow."""
    import pytest

    from jaxvllm import Engine, ModelConfig

    options = {**SMALL, **task.get("engine", {})}
    model = task.get("model", str(MODEL))
    if isinstance(model, dict):
        model = ModelConfig(**model)
    with Engine(model, tensor_parallel_size=task["count"] * task["devices"], **options) as engine:
        if task["me"] == 0:
            return globals()[task["serve"]](engine)
        for call in (lambda: engine.generate([[1]]), lambda: engine.abort_request("x"), lambda: engine.score([1, 2])):
            with pytest.raises(RuntimeError, match=r"process 1 follows process 0: call follow\(\) here"):
                call()
        engine.follow()
        return counts(engine)


def broken(task: dict[str, Any]) -> Any:
    """In process ``who`` something happens at its sixth step, and nobody closes an engine."""
    import jax

    from jaxvllm import Engine, SamplingParams
    from jaxvllm.runtime.executor import Executor

    def refuse(*args: Any) -> None:
        raise MemoryError("no room for step 5")

    if task["what"] == "start" and task["me"] == task["who"]:
        Executor.start = refuse  # type: ignore[method-assign]
    engine = Engine(str(MODEL), tensor_parallel_size=jax.device_count(), **SMALL)
    print("ready", flush=True)
    dispatch, numbers = engine._executor.dispatch, iter(range(10**9))

    def dispatch_or_break(*args: Any) -> Any:
        if next(numbers) == 5 and task["me"] == task["who"]:
            if task["what"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            error = MemoryError("no room for step 5")
            if task["what"] == "stay":  # the others end although this process doesn't
                engine._group.fail(error)
                time.sleep(600)
            raise error
        return dispatch(*args)

    engine._executor.dispatch = dispatch_or_break  # type: ignore[method-assign]
    if task["what"] == "score" and task["me"] == task["who"]:
        engine._executor.score = refuse  # type: ignore[method-assign]
    if task["me"] == 0:
        if task["what"] == "leave":
            engine.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
            raise KeyError("the caller's own mistake")
        if task["what"] == "score":
            engine.score([1, 2, 3])
        engine.generate([[1, 2]] * 4, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        return None
    return engine.follow()


def others(task: dict[str, Any]) -> Any:
    """Engines that can't be had, one of each process alone, one over given weights; and the one of docs/."""
    import jax
    import numpy as np
    import pytest
    from jax.sharding import Mesh

    from jaxvllm import Engine, ModelConfig, SamplingParams
    from jaxvllm.config import ConfigError
    from jaxvllm.convert import load_params
    from jaxvllm.models import qwen3

    with pytest.raises(
        ConfigError, match=r"of the 2 processes only \[0\] own a device of these; pass tensor_parallel_si"
    ):
        Engine(str(MODEL), **SMALL)
    with pytest.raises(ConfigError, match=r"seed=\d here and \d in process \d: make them with equal options"):
        Engine(str(MODEL), tensor_parallel_size=2, seed=task["me"], **SMALL)
    if task["me"] == 1:
        with pytest.raises(ConfigError, match=r"mesh has devices of processes \[0\] only, but this is process 1"):
            Engine(str(MODEL), mesh=Mesh(np.array(jax.devices()[:1]), ("tp",)), **SMALL)
    with Engine(str(MODEL), mesh=Mesh(np.array(jax.local_devices()), ("tp",)), **SMALL) as own:
        found = [own.generate([[1, 2, 3]], SamplingParams(temperature=0), use_tqdm=False)[0].token_ids]

    config = ModelConfig.from_dir(MODEL)
    table = qwen3.param_table(config)
    fused = load_params(MODEL, table, dtype="float32", put=lambda info, array: array)
    unfused = {source.name: source.take(fused[path]) for path, info in table.items() for source in info.sources}
    shape = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "dtype": "float32"}  # fmt: skip
    with Engine(ModelConfig(**shape), tensor_parallel_size=2, warmup=False, **SMALL) as drawn:
        with pytest.raises(ConfigError, match=r"is open on device \d+, and a process follows one at a time"):
            Engine(ModelConfig(**shape), tensor_parallel_size=2, **SMALL)
        if task["me"] == 0:
            drawn.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        else:
            drawn.follow()
    on_device = jax.device_put([fused, unfused], jax.local_devices()[0])
    for params in (fused, unfused, *on_device):
        with Engine.from_params(config, params, tensor_parallel_size=2, warmup=False, **SMALL) as engine:
            with pytest.raises(RuntimeError, match=r"update_params isn't available|call follow"):
                engine.update_params(params)
            if task["me"] == 0:
                with pytest.raises(RuntimeError, match="this one leads"):
                    engine.follow()
                greedy = SamplingParams(temperature=0)
                tokens = engine.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].token_ids
                assert tokens == found[0]
            else:
                engine.follow()

    from jax._src.distributed import global_state

    client: Any = global_state.client
    if task["me"] == 0:  # closing has waited for the others, and deleted what was left
        left = [name for name, _ in client.key_value_dir_get_bytes("jaxvllm")]
        found.append([name for name in left if "/engines/" not in name and "/1/" not in name])  # 1: those that differed
    client.wait_at_barrier("looked", 60_000)  # the other one's next engine would be seen
    text = (ROOT / "docs" / "several-processes.md").read_text()
    example = text.split("```python\n")[1].split("```")[0].replace("jax.distributed.initialize()", "")
    exec(compile(example, "several-processes.md", "exec"), {})
    return found


PROGRAMS = {"run": run, "broken": broken, "others": others}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
