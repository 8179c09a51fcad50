"""What this machine can do at best, measured with plain jax: read and copy bandwidth, bf16 matrix rate.

python -m bench.ceilings

On an H200, runs of the other benchmarks count only beside read >= 4.05 TB/s and matmul >= 750 TFLOP/s: then
the GPU is undisturbed and at full clocks.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bench.common import Row, accelerator_name, parser, record


def median_s(run: Callable[[], jax.Array], *, repeats: int, calls: int) -> float:
    """Seconds of one call: the median over `repeats` of `calls` calls dispatched in a row."""
    run().block_until_ready()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        results = [run() for _ in range(calls)]
        results[-1].block_until_ready()
        times.append((time.perf_counter() - started) / calls)
        del results
    return statistics.median(times)


def read_bytes_per_s(num_bytes: int, repeats: int) -> float:
    """Best of a few ways to read an array once and keep next to nothing: maxima over rows."""
    best = 0.0
    for dtype, columns in ((jnp.float32, 1024), (jnp.float32, 8192), (jnp.bfloat16, 8192), (jnp.int32, 4096)):
        array = jnp.ones((num_bytes // jnp.dtype(dtype).itemsize // columns, columns), dtype)
        largest = jax.jit(lambda x: jnp.max(x, axis=1))
        best = max(best, array.nbytes / median_s(lambda f=largest, x=array: f(x), repeats=repeats, calls=4))
        del array
    return best


def copy_bytes_per_s(num_bytes: int, repeats: int) -> float:
    """Bytes read and written per second by an elementwise operation into a new array."""
    array = jnp.ones((num_bytes // 4,), jnp.float32)
    negate = jax.jit(jnp.negative)
    return 2 * array.nbytes / median_s(lambda: negate(array), repeats=repeats, calls=4)


def matmul_operations_per_s(size: int, repeats: int) -> float:
    """[size, size] x [size, size] in bf16 on normally distributed data (zeros would run at higher clocks)."""
    left, right = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in (0, 1))
    multiply = jax.jit(jnp.matmul)
    return 2 * size**3 / median_s(lambda: multiply(left, right), repeats=repeats, calls=20)


def measure(args: argparse.Namespace) -> list[Row]:
    small = jax.devices()[0].platform == "cpu"
    num_bytes = 2**26 if small else 2**32
    size = 512 if small else 8192
    return [
        Row("read", read_bytes_per_s(num_bytes, args.repeats) / 1e12, "TB/s"),
        Row("copy, read + write", copy_bytes_per_s(num_bytes, args.repeats) / 1e12, "TB/s"),
        Row(f"matmul {size}^3 bf16", matmul_operations_per_s(size, args.repeats) / 1e12, "TFLOP/s"),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=15, help="medians over so many timings")
    args = made.parse_args()
    record("ceilings", measure(args), device=accelerator_name(), args=args)


if __name__ == "__main__":
    main()
