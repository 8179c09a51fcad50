"""Conversion and loading against a plain read of the same bytes, cold and warm page cache.

python -m bench.convert --size-gb 2                        a random model of that size, made in --work and removed
python -m bench.convert --config qwen3-8b --work /scratch  a random model of a named shape (bfloat16)
python -m bench.convert --model DIR                        a checkpoint that is there (nothing is written to DIR)

Cold: the files are written back and dropped from the page cache first (posix_fadvise DONTNEED; a disk with a cache of
its own stays as warm as it is). A plain read: the same files, 16 threads, 16 MB at a time into memory that is reused;
its time is the floor of a load. A load ends when the parameters are on jax's devices.
"""

import argparse
import contextlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from bench.common import Row, accelerator_name, parser, record
from bench.models import model_config
from jaxvllm.config import DTYPE_BYTES, ModelConfig
from jaxvllm.convert.pace import PACE, Pace

THREADS = 16
PIECE_BYTES = 16 << 20


def write_random(folder: Path, config: ModelConfig) -> None:
    """A Hugging Face folder of random bits with that shape, in shards of about 2 GB."""
    import json

    from jaxvllm.convert.safetensors_io import write_file
    from jaxvllm.convert.tables import canonical_table, host_dtype

    folder.mkdir(parents=True)
    fields = {k: v for k, v in asdict(config).items() if k not in ("rope", "eos_token_ids", "architecture")}
    fields |= {"architectures": [config.architecture], "rope_theta": config.rope.theta}
    (folder / "config.json").write_text(json.dumps(fields))
    dtype = host_dtype(config.dtype)
    sources = [source for info in canonical_table(config).values() for source in info.sources]
    block = np.random.default_rng(0).integers(0, 256, max(math.prod(s.shape) for s in sources) * 4, dtype=np.uint8)
    shards: list[list] = [[]]
    for source in sources:
        if sum(math.prod(s.shape) for s in shards[-1]) * dtype.itemsize >= 2e9:
            shards.append([])
        shards[-1].append(source)
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        shapes = {s.name: (dtype, s.shape) for s in shard}
        tensors = ((s.name, block[: math.prod(s.shape) * dtype.itemsize].view(dtype).reshape(s.shape)) for s in shard)
        write_file(folder / name, shapes, tensors)
        weight_map |= {s.name: name for s in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sized_config(size_gb: float) -> ModelConfig:
    """Qwen3-8B's widths with as many layers as give that size, and a smaller vocabulary below 8 GB."""
    config = replace(model_config("qwen3-8b"), vocab_size=151936 if size_gb >= 8 else 32000)
    per_layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) * DTYPE_BYTES[config.dtype]
    outside = 2 * config.vocab_size * config.hidden_size * DTYPE_BYTES[config.dtype]
    return replace(config, num_hidden_layers=max(1, round((size_gb * 1e9 - outside) / per_layer)))


def weight_files(folder: Path) -> list[Path]:
    """Every file: what isn't weights is a few kB."""
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]


@cache
def buffers() -> list[memoryview]:
    """One for each thread, touched before anything is timed."""
    return [memoryview(bytearray(b"x" * PIECE_BYTES)) for _ in range(THREADS)]


def drop_from_cache(folder: Path) -> None:
    for file in weight_files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(folder: Path) -> None:
    """Every byte once, in parallel, into memory that is reused."""
    pieces = [(f, at) for f in weight_files(folder) for at in range(0, f.stat().st_size, PIECE_BYTES)]

    def read(mine: list[tuple[Path, int]], view: memoryview) -> None:
        for file, at in mine:
            descriptor = os.open(file, os.O_RDONLY)
            while count := os.preadv(descriptor, [view[: PIECE_BYTES - (at % PIECE_BYTES)]], at):
                at += count
                if at % PIECE_BYTES == 0:
                    break
            os.close(descriptor)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, [pieces[i::THREADS] for i in range(THREADS)], buffers()))


def load(folder: Path, tp: int, pace: Pace) -> None:
    import jax

    from jaxvllm.convert import load_shards
    from jaxvllm.models.registry import param_table
    from jaxvllm.runtime.mesh import make_mesh
    from jaxvllm.runtime.upload import open_upload
    from jaxvllm.runtime.weights import make_place

    config = ModelConfig.from_dir(folder)
    mesh = make_mesh(tp)
    with open_upload(mesh.local_devices) or contextlib.nullcontext() as upload:
        params = load_shards(folder, param_table(config, tp=tp), dtype=config.dtype, place=make_place(mesh, upload),
                             keeps=mesh.devices.flat[0].platform == "cpu", pace=pace)  # fmt: skip
    jax.block_until_ready(params)


def timed(action: Callable[[], object], before: Callable[[], None], repeats: int) -> float:
    """The median of the seconds that ``action`` takes, ``before`` done each time before it."""
    seconds = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peak_bytes(source: Path, target: Path) -> int:
    """The largest resident memory of a process that converts, as a user runs it: watched, every 5 ms.

    (Its ru_maxrss would begin with what this process had when it was forked.)
    """
    command = [sys.executable, "-m", "jaxvllm.convert", str(source), str(target), "--force"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
            peak = max(peak, pages * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return peak


def measure(source: Path, work: Path, label: str, args: argparse.Namespace) -> Iterator[Row]:
    from jaxvllm.convert import convert_checkpoint, verify_checkpoint

    ours, repeats = work / "ours", args.repeats
    loads = partial(load, tp=args.tensor_parallel_size, pace=args.pace)
    size = sum(f.stat().st_size for f in weight_files(source)) / 1e9

    def rows_of(what: str, seconds: float, floor: float | None) -> Iterator[Row]:
        yield Row(f"{label} {what}", seconds, "s", floor)
        yield Row(f"{label} {what} rate", size / seconds, "GB/s", None if floor is None else size / floor)

    def convert() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        convert_checkpoint(source, ours)

    buffers()
    if not args.safetensors_only:
        yield Row(f"{label} convert, peak memory", peak_bytes(source, ours) / 1e9, "GB")
    loads(source)
    for state in args.states.split(","):
        ready = partial(partial, drop_from_cache if state == "cold" else plain_read)

        floor = timed(lambda: plain_read(source), ready(source), repeats)
        yield from rows_of(f"plain read {state}", floor, None)
        yield from rows_of(f"load safetensors {state}", timed(lambda: loads(source), ready(source), repeats), floor)
        if args.safetensors_only:
            continue
        own_floor = timed(lambda: plain_read(ours), ready(ours), repeats)
        yield from rows_of(f"load ours {state}", timed(lambda: loads(ours), ready(ours), repeats), own_floor)
        yield from rows_of(f"verify {state}", timed(partial(verify_checkpoint, ours), ready(ours), repeats), own_floor)
        yield from rows_of(f"convert {state}", timed(convert, ready(source), repeats), None)


def main() -> None:
    made = parser(__doc__)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--size-gb", type=float, default=2.0, help="size of the random model (default: 2)")
    what.add_argument("--config", help="qwen3-0.6b, qwen3-8b or tiny: a random model of that shape")
    what.add_argument("--model", type=Path, help="a Hugging Face folder that is there")
    made.add_argument("--work", type=Path, help="folder to write in, 2 x the model (default: a temporary one)")
    made.add_argument("--tensor-parallel-size", "--tp", type=int, default=1)
    made.add_argument("--states", default="cold,warm", help="of the page cache (default: cold,warm)")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--safetensors-only", action="store_true", help="no conversion, only plain reads and loads")
    made.add_argument("--parameters", type=int, default=PACE.parameters, help="on their way at the same time")
    made.add_argument("--readers", type=int, default=PACE.readers, help="threads that read")
    made.add_argument(
        "--memory-mb", type=int, default=PACE.memory_bytes >> 20, help="host memory of those on their way"
    )
    args = made.parse_args()
    args.pace = Pace(args.parameters, args.readers, args.memory_mb << 20)
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=args.work) as folder:
        source = args.model or Path(folder) / "hf"
        if args.model is None:
            write_random(source, model_config(args.config) if args.config else sized_config(args.size_gb))
        label = args.config or (args.model.name if args.model else f"{args.size_gb:g} GB")
        label += f" tp{args.tensor_parallel_size}" if args.tensor_parallel_size > 1 else ""
        if args.pace != PACE:
            label += f" {args.parameters} on their way in {args.memory_mb} MB, {args.readers} readers,"
        for row in measure(source, Path(folder), label, args):
            record("convert", [row], device=accelerator_name(args.tensor_parallel_size), args=args)


if __name__ == "__main__":
    main()
