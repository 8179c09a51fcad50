"""The kernels of a batch-invariant engine: right, and the same bits for a row among any others. CPU: interpreted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from jaxvllm.kernels import prefill_mosaic, prefill_triton
from tests.kernels.test_fused import backend, draw
from tests.kernels.test_lowering import DEVICES, MOSAIC_CALL, TRITON_CALL, cuda_text

GPU = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
PICKS = ([0], [3], [5, 3], [9, 8, 7, 6, 5, 4, 3])  # rows whose results are compared, alone or among others


def same_rows(function: Any, *arrays: np.ndarray, picks: Any = PICKS) -> Any:
    """function(*arrays), once the same rows picked from it and from its arguments have been the same bits."""
    whole = jax.jit(function)(*arrays)
    for pick in picks:
        part = jax.jit(function)(*(array[np.array(pick)] for array in arrays))
        jax.tree.map(lambda a, b, p=pick: np.testing.assert_array_equal(a[np.array(p)], b), whole, part)
    return whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "inner", "columns"),
    [(10, 64, 48), (10, 96, 331), (70, 40, 80), pytest.param(700, 4096, 6144, marks=GPU),
     pytest.param(300, 3072, 1024, marks=GPU), pytest.param(40, 1024, 151_936, marks=GPU)],
)  # fmt: skip
def test_matmul(tokens: int, inner: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(inner)
    x, weight = draw(rng, tokens, inner, dtype=dtype), draw(rng, columns, inner, dtype=dtype)

    def function(x: jax.Array) -> jax.Array:
        return kernels.matmul(x, jnp.asarray(weight), out_dtype="float32", backend=backend())

    want = x.astype(np.float64) @ weight.astype(np.float64).T
    picks = [*PICKS, list(range(tokens - 1, 2, -1))]
    # a float32 sum of so many terms, one after the other; TF32 would be off by 6e-5, bfloat16 sums by far more
    bound = 2e-6 * max(1, inner / 1024) * np.abs(want).max()
    np.testing.assert_allclose(same_rows(function, x, picks=picks), want, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_silu_mul(dtype: str) -> None:
    gate_up = draw(np.random.default_rng(0), 10, 2, 1100, dtype=dtype)
    got = same_rows(lambda x: kernels.silu_mul(x, backend=backend()), gate_up)
    gate, up = np.moveaxis(gate_up.astype(np.float64), 1, 0)
    unit = 2e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(got, np.float64), gate / (1 + np.exp(-gate)) * up, rtol=unit, atol=1e-6)


def test_rope_tables() -> None:
    positions, frequencies = np.arange(10, dtype=np.int32) * 977, (10_000.0 ** -np.linspace(0, 1, 20)).astype("float32")

    def function(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kernels.rope_tables(positions, jnp.asarray(frequencies), factor=1.25, backend=backend())

    cos, sin = same_rows(function, positions)
    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos, 1.25 * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, 1.25 * np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("size", [100, 20_000])
def test_the_log_of_a_sum(size: int) -> None:
    logits = draw(np.random.default_rng(1), 10, size, dtype="float32") * 5
    logits[2, ::2] = -np.inf

    def function(logits: jax.Array) -> jax.Array:
        peak = jnp.max(logits, axis=1)
        return kernels.log_sum(peak, kernels.sum_exp(logits, peak, backend=backend()), backend=backend())

    want = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(same_rows(function, logits), want, rtol=1e-6)


def test_rope_write_is_the_plain_rotation_and_write() -> None:
    rng = np.random.default_rng(2)
    tokens, kv_heads, groups, head_dim = 10, 2, 3, 32
    qkv, kv = draw(rng, tokens, kv_heads, groups + 2, head_dim, dtype="float32"), np.zeros((2, 2, 4, 2, 4, 32), "f4")
    angles = rng.uniform(0, 7, (tokens, head_dim // 2))
    cos, sin, slots = np.cos(angles).astype("f4"), np.sin(angles).astype("f4"), np.arange(tokens, dtype=np.int32) + 3

    @jax.jit
    def write(qkv: Any, cos: Any, sin: Any, kv: Any) -> tuple[jax.Array, jax.Array]:
        return kernels.rope_write(qkv, cos, sin, kv, jnp.int32(1), jnp.asarray(slots), backend=backend())

    queries, cache = write(qkv, cos, sin, kv)
    left, right = np.split(qkv, 2, axis=-1)
    c, s = cos[:, None, None], sin[:, None, None]
    turned = np.concatenate([left * c - right * s, right * c + left * s], axis=-1)
    np.testing.assert_allclose(queries, turned[:, :, :groups].reshape(tokens, -1, head_dim), atol=1e-5)
    written = np.moveaxis(np.asarray(cache)[1], 2, 3).reshape(2, 16, kv_heads, head_dim)[:, slots]
    np.testing.assert_allclose(written[0], turned[:, :, groups], atol=1e-5)
    np.testing.assert_array_equal(written[1], qkv[:, :, groups + 1])


CUTS = ([150], [1] * 5 + [145], [64, 64, 22], [37, 90, 23], [149, 1])
FEW_CUTS = ([70], [64, 5, 1])  # whole, full, partial, single; two tiles of keys


@pytest.mark.parametrize("name", ["xla", "triton", "mosaic"])
def test_attention_of_a_query_is_the_same_in_any_tile(name: str) -> None:
    """One sequence's queries in pieces of any length, behind another sequence's: in tiles of all kinds."""
    on_gpu = jax.default_backend() == "gpu"
    name = name if on_gpu or name == "xla" else f"{name}_interpret"
    rng = np.random.default_rng(3)
    # it is slow; a kv head's items know nothing of the others
    kv_heads, cuts = (1, FEW_CUTS) if name == "mosaic_interpret" else (2, CUTS)
    kv = draw(rng, 1, 2, 24, kv_heads, 16, 64, dtype="bfloat16")
    q = draw(rng, sum(cuts[0]), 2 * kv_heads, 64, dtype="bfloat16")
    tables = rng.permutation(24)[:20].reshape(2, 10).astype(np.int32)

    def piece(start: int, size: int, before: int) -> np.ndarray:
        """Queries start..start+size-1 of sequence 1 in a step with `before` queries of sequence 0."""
        bounds = np.array([0, before, before + size], np.int32)
        tiles = [(s, t) for s in (0, 1) for t in range(bounds[s], bounds[s + 1], 64)]
        tiles += [(-1, 0)] * (5 - len(tiles))
        seq, first = np.array(tiles, np.int32).T
        queries = np.zeros((192, *q.shape[1:]), q.dtype)
        queries[:before], queries[before : before + size] = q[:before] * 2, q[start : start + size]
        lens = np.array([before, start + size], np.int32)
        return np.asarray(attend(queries, kv, tables, lens, bounds, seq.copy(), first.copy()))[before : before + size]

    @jax.jit
    def attend(q: Any, kv: Any, tables: Any, lens: Any, bounds: Any, seq: Any, first: Any) -> jax.Array:
        return kernels.ragged_attention(q, kv, jnp.int32(0), tables, lens, bounds, seq, first, scale=0.3,
                                        query_tile=64, backend=name, invariant=True)  # fmt: skip

    want = None
    for cut, before in zip(cuts, (3, 17, 0, 1, 40), strict=False):
        starts = np.cumsum([0, *cut[:-1]])
        got = np.concatenate([piece(int(s), n, before) for s, n in zip(starts, cut, strict=True)])
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [pytest.param(device, dtype, marks=() if i == j else pytest.mark.slow)
     for i, device in enumerate(DEVICES) for j, dtype in enumerate(("bfloat16", "float32"))],
)  # fmt: skip
def test_everything_lowers(device: str, dtype: str) -> None:
    def shape(*sizes: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    def count(function: Any, *arguments: jax.ShapeDtypeStruct) -> int:
        return cuda_text(function, arguments, device).count(TRITON_CALL)

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        return kernels.matmul(x, weight, out_dtype=dtype, backend="triton")

    for tokens in (1, 8192):
        for inner, columns in ((1024, 4096), (12288, 4096), (1000, 331), (4096, 151_936 // 8)):
            assert count(matmul, shape(tokens, inner), shape(columns, inner)) == 1
        assert count(lambda x: kernels.silu_mul(x, backend="triton"), shape(tokens, 2, 3072)) == 1
        floats, positions = shape(64, dtype="float32"), shape(tokens, dtype="int32")
        assert count(lambda p, f: kernels.rope_tables(p, f, factor=1.0, backend="triton"), positions, floats) == 1
        qkv, kv, angles = shape(tokens, 8, 4, 128), shape(36, 2, 99, 8, 64, 128), shape(tokens, 64, dtype="float32")
        assert count(lambda q, c, s, kv, slots: kernels.rope_write(q, c, s, kv, 1, slots, backend="triton"),
                     qkv, angles, angles, kv, positions) == 1  # fmt: skip
        peak = shape(tokens, dtype="float32")
        logits, pieces = shape(tokens, 151_936, dtype="float32"), shape(tokens, 19, dtype="float32")
        assert count(lambda x, p: kernels.sum_exp(x, p, backend="triton"), logits, peak) == 1
        assert count(lambda p, x: kernels.log_sum(p, x, backend="triton"), peak, pieces) == 1


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_decode_rows_lower_as_a_ragged_step(batch: int) -> None:
    def shape(*sizes: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    arguments = [shape(batch, 16, 128, dtype="bfloat16"), shape(36, 2, 999, 8, 64, 128, dtype="bfloat16"),
                 shape(batch, 64), shape(batch), shape(batch + 1), shape(batch), shape(batch)]  # fmt: skip
    for name, call in (("triton", TRITON_CALL), ("mosaic", MOSAIC_CALL)):
        text = cuda_text(
            lambda q, kv, *plan, name=name: kernels.ragged_attention(
                q, kv, 3, *plan, scale=0.1, query_tile=64, backend=name, invariant=True
            ),
            arguments,
        )
        assert text.count(call) == 1


@pytest.mark.parametrize("module", [prefill_triton, prefill_mosaic], ids=["triton", "mosaic"])
def test_every_tile_goes_through_the_masked_code(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a query's place decides which of two programs it meets. Interpreted, both give the same bits: asked here."""
    configs: list[Any] = []
    monkeypatch.setattr(module, "ragged_attention", lambda *_, config=None, **__: configs.append(config))
    q, kv = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 4, 64), (1, 2, 24, 2, 64, 64)))
    module.invariant_attention(q, kv, query_tile=64, interpret=True)
    assert [config is not None and config.mask_all for config in configs] == [True]
