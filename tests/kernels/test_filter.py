"""filter_threshold: the sets that min_p, top_k and top_p keep, by sorting in float64. CPU: interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from tests.kernels.test_fused import backend
from tests.kernels.test_lowering import DEVICES, TRITON_CALL, cuda_text

GPU = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@jax.jit
def filter_threshold(*arguments: jax.Array) -> jax.Array:
    """One program for all tests of a shape."""
    return kernels.filter_threshold(*arguments, backend=backend())


def rows_of(kind: str, rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Logits [rows, size] float32 of one kind."""
    x = rng.normal(size=(rows, size)).astype(np.float32) * 4
    if kind == "ties":
        x = np.round(x)
    elif kind == "masked":
        x[rng.random(x.shape) < 0.9] = -np.inf
    elif kind == "wide":  # of every magnitude and both signs
        x = (x * np.exp2(rng.uniform(-120, 100, x.shape))).astype(np.float32)
    elif kind == "outlier":
        x[:, size // 3] = 3e38
        x[:, size // 2] = -3e38
    elif kind == "close":  # neighbours among the floats
        x = (np.float32(7).view(np.uint32) + rng.integers(0, 40, x.shape).astype(np.uint32)).view(np.float32)
    elif kind == "zeros":
        x = np.where(rng.random(x.shape) < 0.5, np.float32(-0.0), np.float32(0))
    elif kind == "infinite":
        x[:, :3] = np.inf
    return x


@np.errstate(invalid="ignore")  # inf - inf
def kept(x: np.ndarray, temperature: float, k: int, p: float, log_min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Which of a row stay, and of which float32 can't tell."""
    scale = temperature if temperature > 0 else 1.0
    z = x.astype(np.float64)
    low = z.max() + scale * log_min_p if log_min_p > -np.inf else -np.inf
    unsure = np.abs(z - low) <= 1e-6 * max(1.0, abs(low)) if low > -np.inf else np.zeros(z.shape, bool)
    order = np.sort(z)[::-1]
    if 0 < k < z.size:
        low = max(low, order[k - 1])
    stays = z >= low
    if p < 1:
        weight = np.where(z == z.max(), 1.0, np.exp((z - z.max()) / scale)) * stays
        values, place = np.unique(z, return_inverse=True)
        mass = np.bincount(place, weights=weight, minlength=len(values))
        above = np.cumsum(mass[::-1])[::-1] - mass  # more probable than the value
        share = above[place] / weight.sum()
        stays &= share < p
        unsure |= np.abs(share - p) < 3e-6
    return stays, unsure


KINDS = ["normal", "ties", "masked", "wide", "outlier", "close", "zeros", "infinite"]
WISHES = [(0, 1.0, -np.inf), (1, 1.0, -np.inf), (5, 1.0, -np.inf), (50, 0.9, -np.inf), (0, 0.5, -np.inf),
          (0, 0.999, -np.inf), (0, 1e-6, -np.inf), (10**9, 0.95, -np.inf), (0, 1.0, np.log(0.05)),
          (40, 0.8, np.log(0.02)), (3, 0.3, np.log(0.5)), (2**31 - 1, 1.0, np.log(1e-8))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [37, 20_000, pytest.param(151_936, marks=GPU)])
def test_kept_sets(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = rows_of(kind, rng, 2 * len(WISHES), size)
    temperatures = np.resize(np.array([0.6, 1, 0, 3, 1e-3], np.float32), len(x))
    k, p, m = (np.resize(np.array(column), len(x)) for column in zip(*WISHES, strict=True))
    arguments = x, temperatures, k.astype(np.int32), p.astype(np.float32), m.astype(np.float32)
    lows = filter_threshold(*arguments)
    lows, sure = np.asarray(lows), 0
    for row, logits in enumerate(x):
        temperature, share = float(temperatures[row]), float(np.float32(p[row]))
        stays, unsure = kept(logits, temperature, int(k[row]), share, float(m[row]))
        assert ((logits >= lows[row]) == stays)[~unsure].all(), (kind, row)
        sure += not unsure.any()
    assert sure >= (0 if kind == "close" else len(x) // 2)


def test_a_row_is_not_its_neighbours_business() -> None:
    rng = np.random.default_rng(0)
    x = rows_of("normal", rng, 6, 5000)
    temperatures, p, m = (np.full(6, number, np.float32) for number in (0.7, 0.9, -np.inf))
    arguments = x, temperatures, np.array([0, 50, 0, 7, 50, 0], np.int32), p, m
    together = x >= np.asarray(filter_threshold(*arguments))[:, None]
    alone = [x[i] >= np.asarray(filter_threshold(*(column[i : i + 1] for column in arguments)))[0] for i in range(6)]
    np.testing.assert_array_equal(together, alone)


def test_the_highest_temperatures_and_what_is_left_out() -> None:
    """Where 1 / temperature is no normal float any more, and beside logits of -inf: all that exist weigh the same."""
    x = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    x[2:, ::2] = -np.inf
    temperatures = np.array([1.2e38, 3.4e38, 1.3e38, 1e37], np.float32)
    wishes = np.zeros(4, np.int32), np.full(4, 0.5, np.float32), np.full(4, -np.inf, np.float32)
    lows = filter_threshold(x, temperatures, *wishes)
    assert (x >= np.asarray(lows)[:, None]).sum(axis=1).tolist() == [4, 4, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_lowers(device: str) -> None:
    shapes = (256, 151_936), (256,), (256,), (256,), (256,)
    dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert (
        cuda_text(lambda *a: kernels.filter_threshold(*a, backend="triton"), arguments, device).count(TRITON_CALL) == 1
    )
