"""A process that has imported everything and forks a conversion for each line it reads, to be killed: 0.2 s a round.

A line is JSON {to, src, dst, force, part_bytes, delay}: the child gets SIGKILL after ``delay`` seconds (null: never).
Answers with JSON {killed, status, seconds}. Nothing in it has started a thread or a backend before it forks.
"""

import json
import os
import signal
import sys
import time
import warnings

warnings.simplefilter("ignore")
os.environ["JAX_PLATFORMS"] = "cpu"

import jaxvllm.convert.build as build  # noqa: E402
import jaxvllm.convert.parts  # noqa: E402, F401
from jaxvllm.convert.export import export_hf  # noqa: E402


def main() -> None:
    print("{}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                build.PART_BYTES = task["part_bytes"]
                write = export_hf if task["to"] == "hf" else build.convert_checkpoint
                write(task["src"], task["dst"], force=task["force"])
                status = 0
            finally:
                os._exit(status)
        deadline = None if task["delay"] is None else started + task["delay"]
        done = 0
        while done == 0 and (deadline is None or time.perf_counter() < deadline):
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.0005)
        killed = done == 0
        if killed:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        print(json.dumps({"killed": killed, "status": status, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
