"""Every backend, one table of shapes: decode, ragged and KV write against the float64 oracle (Pallas interpreted)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from jaxvllm.kernels import decode_triton
from tests.kernels import cases, oracle

BACKENDS = ("reference", "xla", "triton_interpret")
HALF_CASES = ("ratio2-16", "prefix-16")  # the ones that run in bfloat16 too
DECODE_PARAMS = [(c, "float32") for c in cases.DECODE_CASES] + [
    (c, "bfloat16") for c in cases.DECODE_CASES if c.name in HALF_CASES
]
RAGGED_PARAMS = [(c, "float32") for c in cases.RAGGED_CASES] + [
    (c, "bfloat16") for c in cases.RAGGED_CASES if c.name in HALF_CASES
]


def with_mosaic(of_mosaic: Sequence[Any]) -> list[Any]:
    """Mosaic's own cases, for all backends; to the others its shapes are nothing that theirs don't have."""
    marks: dict[str, Any] = dict.fromkeys(BACKENDS, pytest.mark.slow)
    return [pytest.param(case, "bfloat16", backend, marks=marks.get(backend, ()))
            for case in of_mosaic for backend in (*BACKENDS, "mosaic_interpret")]  # fmt: skip


ALL_DECODE = [(*p, b) for p in DECODE_PARAMS for b in BACKENDS] + with_mosaic(cases.MOSAIC_DECODE_CASES)
ALL_RAGGED = [(*p, b) for p in RAGGED_PARAMS for b in BACKENDS] + with_mosaic(cases.MOSAIC_CASES)


def supports(backend: str, head_dim: int) -> bool:
    return backend in ("reference", "xla") or head_dim & (head_dim - 1) == 0


def skip_unsupported(backend: str, head_dim: int) -> None:
    if not supports(backend, head_dim):
        pytest.skip(f"{backend} has no head_dim {head_dim}: resolve_backend gives xla")


def assert_close(got: jax.Array, want: np.ndarray, dtype: str) -> None:
    absolute, relative = cases.TOLERANCES[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=absolute, rtol=relative)


@functools.cache
def compiled(operation: str, backend: str, **options) -> Callable[..., jax.Array]:
    """The jitted operation. On a CPU the interpreter's program is large and runs once: compile it unoptimised."""
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    function = functools.partial(getattr(kernels, operation), backend=backend, **options)
    return jax.jit(function, compiler_options=fast, donate_argnames="kv" if operation == "write_kv" else None)


def run_decode(inputs: dict[str, Any], backend: str) -> tuple[jax.Array, np.ndarray]:
    """The backend's result, with the layer as an operand, and the oracle's."""
    scale = inputs["q"].shape[-1] ** -0.5
    got, arrivals = compiled("decode_attention", backend, scale=scale)(layer=jnp.int32(cases.LAYER), **inputs)
    assert not np.asarray(arrivals).any()
    return got, oracle.decode(layer=cases.LAYER, scale=scale, **inputs)


def run_ragged(inputs: dict[str, Any], query_tile: int, backend: str) -> tuple[jax.Array, np.ndarray]:
    """The backend's result, with the layer as an operand, and the oracle's."""
    scale = inputs["q"].shape[-1] ** -0.5
    function = compiled("ragged_attention", backend, scale=scale, query_tile=query_tile)
    got = function(layer=jnp.int32(cases.LAYER), **inputs)
    plain = {name: value for name, value in inputs.items() if not name.startswith("tile_")}
    return got, oracle.ragged(layer=cases.LAYER, scale=scale, **plain)


def check_write(inputs: dict[str, Any], backend: str) -> None:
    """The whole cache after a donating write equals the oracle's, bit for bit."""
    device = cases.on_device(inputs)
    got = np.asarray(compiled("write_kv", backend)(layer=jnp.int32(cases.LAYER), **device))
    want = oracle.write(layer=cases.LAYER, **inputs)
    bits = np.dtype(f"u{want.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits), want.view(bits))
    changed = (want.view(bits) != inputs["kv"].view(bits)).any(axis=(3, 5))
    assert changed.sum() == 2 * 4 - 2 * (inputs["kv"].shape[4] == 1)  # keys and values of the kept slots


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Mosaic's rows beyond the group
@pytest.mark.parametrize(("case", "dtype", "backend"), ALL_DECODE, ids=lambda p: getattr(p, "name", p))
def test_decode(case: cases.DecodeCase, dtype: str, backend: str) -> None:
    skip_unsupported(backend, case.shape.head_dim)
    got, want = run_decode(cases.decode_inputs(case, dtype), backend)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, want, dtype)


@pytest.mark.parametrize(
    ("splits", "programs", "fused"), [(1, 1, True), (2, 99, False), (16, 20, True), (32, 999, True), (32, 999, False)]
)
def test_splits_change_nothing(splits: int, programs: int, fused: bool) -> None:
    """One split to more than there are tiles, combined by the last program or by a second launch; empty rows too."""
    case = cases.DecodeCase("splits", cases.Shape((4, 2), 16, 16), (0, 1, 16, 300, 17, 130), width=20)
    inputs = cases.decode_inputs(case, "float32")
    config = decode_triton.DecodeConfig(splits, (programs, programs), 1, 16, 1, 1, fused)
    function = functools.partial(decode_triton.decode_attention, scale=0.25, config=config, interpret=True)
    fast = {"xla_backend_optimization_level": 0}
    got, arrivals = jax.jit(function, compiler_options=fast)(layer=jnp.int32(cases.LAYER), **cases.on_device(inputs))
    assert not np.asarray(arrivals).any()
    assert_close(got, oracle.decode(layer=cases.LAYER, scale=0.25, **inputs), "float32")


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # Mosaic's: NaN of pad tokens
@pytest.mark.parametrize(("case", "dtype", "backend"), ALL_RAGGED, ids=lambda p: getattr(p, "name", p))
def test_ragged(case: cases.RaggedCase, dtype: str, backend: str) -> None:
    skip_unsupported(backend, case.shape.head_dim)
    got, want = run_ragged(cases.ragged_inputs(case, dtype), case.query_tile, backend)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, want, dtype)
    used = sum(count for count, _ in case.rows)
    assert not np.asarray(got[used:], np.float32).any()  # pad tokens: exactly zero


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", cases.TOLERANCES)
@pytest.mark.parametrize("shape", cases.WRITE_SHAPES, ids=lambda s: f"{s.heads[1]}x{s.head_dim}-{s.block_size}")
def test_write_drops_and_touches_nothing_else(shape: cases.Shape, dtype: str, backend: str) -> None:
    check_write(cases.write_inputs(shape, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunked_prompt_equals_one_shot_and_decode(backend: str) -> None:
    """A prompt written and attended in chunks of 5, 11 and 1 gives each token what a single step gives it."""
    case = cases.RaggedCase("one-shot", cases.Shape((4, 2), 16, 4), ((17, 17),), tokens=24)
    inputs = cases.ragged_inputs(case, "float32")
    whole, _ = run_ragged(inputs, case.query_tile, backend)
    done = 0
    for count in (5, 11, 1):
        chunk = cases.RaggedCase("chunk", case.shape, ((count, done + count),), tokens=16)
        step = cases.ragged_inputs(chunk, "float32")
        step |= {"kv": inputs["kv"], "block_tables": inputs["block_tables"]}
        step["q"][:count] = inputs["q"][done : done + count]
        got, _ = run_ragged(step, chunk.query_tile, backend)
        np.testing.assert_allclose(got[:count], whole[done : done + count], atol=2e-6)
        done += count
    last = {name: inputs[name] for name in ("kv", "block_tables", "context_lens")}
    q = inputs["q"][16:17]
    got, _ = run_decode({"q": q, "arrivals": np.zeros(q.shape[:2], np.int32), **last}, backend)
    np.testing.assert_allclose(got[0], whole[16], atol=2e-6)
