"""The fused elementwise kernels against a float64 oracle: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from jaxvllm.kernels.noise import gumbel_noise
from tests.kernels.test_lowering import cuda_text

EPS = 1e-6
GPU = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def backend() -> str:
    """Asked when a test runs: asking starts jax, and an engine must set its share of memory before that."""
    return "triton" if jax.default_backend() == "gpu" else "triton_interpret"


def tolerance(dtype: str, want: np.ndarray) -> dict[str, Any]:
    """bfloat16 rounds three times (norm, weight, rotation), each 2^-9 of a value that the rotation may cancel."""
    unit = 2e-7 if dtype == "float32" else 2**-9
    return {"atol": 3 * unit * float(np.abs(want).max()), "rtol": 3 * unit}


def draw(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 96), (3, 1024), pytest.param(300, 4096, marks=GPU)])
def test_add_rms_norm(tokens: int, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    x, delta = draw(rng, tokens, size, dtype=dtype), draw(rng, tokens, size, dtype=dtype)
    weights = draw(rng, 3, size, dtype=dtype)
    function = jax.jit(lambda *args: kernels.add_rms_norm(*args, eps=EPS, backend=backend()))
    total, normed = (np.asarray(out, np.float64) for out in function(x, delta, weights, jnp.int32(2)))
    wide = x.astype(np.float64) + delta.astype(np.float64)
    np.testing.assert_allclose(total, wide, **tolerance(dtype, wide))
    want = rms(total, weights[2].astype(np.float64))
    np.testing.assert_allclose(normed, want, **tolerance(dtype, want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_add_rms_norm_sums_parts(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, parts = draw(rng, 3, 96, dtype=dtype), draw(rng, 4, 3, 96, dtype="float32")
    function = jax.jit(lambda *args: kernels.add_rms_norm(*args, eps=EPS, backend=backend()))
    total, normed = (np.asarray(out, np.float64) for out in function(x, parts, np.ones((1, 96), dtype), jnp.int32(0)))
    wide = x.astype(np.float64) + parts.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(total, wide, **tolerance(dtype, wide))
    np.testing.assert_allclose(normed, rms(total, np.ones(96)), **tolerance(dtype, rms(total, np.ones(96))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "block_size"),
    [(7, (4, 2), 32, 4), (3, (6, 2), 40, 16), (5, (5, 1), 64, 16), (4, (3, 3), 16, 1),
     pytest.param(700, (32, 8), 128, 64, marks=GPU), pytest.param(64, (40, 8), 128, 256, marks=GPU)],
)  # fmt: skip
def test_qk_norm_rope_write(tokens: int, heads: tuple[int, int], head_dim: int, block_size: int, dtype: str) -> None:
    """Queries, the written slots, and nothing else of the cache; pads (out of range) are dropped."""
    rng = np.random.default_rng(head_dim)
    q_heads, kv_heads = heads
    groups, layers, layer = q_heads // kv_heads, 3, 1
    num_blocks = tokens // block_size + 3
    qkv = draw(rng, tokens, kv_heads, groups + 2, head_dim, dtype=dtype)
    q_norm, k_norm = draw(rng, layers, head_dim, dtype=dtype), draw(rng, layers, head_dim, dtype=dtype)
    angles = rng.uniform(0, 7, (tokens, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    before = draw(rng, layers, 2, num_blocks, kv_heads, block_size, head_dim, dtype=dtype)
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32)
    slots[0], slots[1] = -1, num_blocks * block_size
    function = jax.jit(lambda *args: kernels.qk_norm_rope_write(*args, eps=EPS, backend=backend()), donate_argnums=(5,))
    arguments = (qkv, q_norm, k_norm, cos, sin, jnp.asarray(before), jnp.int32(layer), slots)
    queries, kv = (np.asarray(out) for out in function(*arguments))

    def rotated(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x = rms(x.astype(np.float64), weight.astype(np.float64))
        left, right = np.split(x, 2, axis=-1)
        c, s = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
        return np.concatenate([left * c - right * s, right * c + left * s], axis=-1)

    wanted = rotated(qkv[:, :, :groups], q_norm[layer]).reshape(tokens, q_heads, head_dim)
    np.testing.assert_allclose(queries.astype(np.float64), wanted, **tolerance(dtype, wanted))
    keys = rotated(qkv[:, :, groups : groups + 1], k_norm[layer])[:, :, 0]
    values = qkv[:, :, groups + 1]
    untouched = np.ones(before.shape, bool)
    for token in range(2, tokens):
        block, offset = divmod(int(slots[token]), block_size)
        np.testing.assert_allclose(
            kv[layer, 0, block, :, offset].astype(np.float64), keys[token], **tolerance(dtype, keys)
        )
        assert (kv[layer, 1, block, :, offset] == values[token]).all()
        untouched[layer, :, block, :, offset] = False
    assert (kv[untouched] == before[untouched]).all()


def test_lowers_for_a_gpu() -> None:
    """Both kernels compile to Triton for an H200 at full-size shapes, from here."""
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32

    def both(x, weight, qkv, q_norm, cos, kv, layer, slots):
        total, y = kernels.add_rms_norm(x, x, weight, layer, eps=EPS, backend="triton")
        return (
            total,
            y,
            kernels.qk_norm_rope_write(qkv, q_norm, q_norm, cos, cos, kv, layer, slots, eps=EPS, backend="triton"),
        )

    shapes = [((8, 4096), bf16), ((36, 4096), bf16), ((8, 8, 6, 128), bf16), ((36, 128), bf16), ((8, 64), f32),
              ((4, 2, 9, 8, 64, 128), bf16), ((), i32), ((8,), i32)]  # fmt: skip
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    text = cuda_text(both, arguments)
    assert "qk_norm_rope_write" in text and "add_rms_norm" in text


@pytest.mark.parametrize(
    ("rows", "size", "start", "vocab_size"),
    [(5, 93, 0, 90), (4, 2500, 0, 2500), (3, 2100, 2077, 4150), pytest.param(256, 151_936, 0, 151_936, marks=GPU),
     pytest.param(9, 75_968, 75_968, 151_936, marks=GPU), pytest.param(1, 300_001, 7, 299_000, marks=GPU)],
)  # fmt: skip
def test_gumbel_argmax(rows: int, size: int, start: int, vocab_size: int) -> None:
    """The winner of logits plus scaled noise, also on a shard that begins inside a tile; greedy rows among others."""
    rng = np.random.default_rng(rows)
    logits = rng.normal(size=(rows, size)).astype(np.float32) * 4
    logits[0, 3:] = logits[0, :3].max() + 1  # equal values: the lowest id
    logits[-1, :: size // 7] = np.nan
    logits[:, 5 :: size // 9] = -np.inf  # what processors leave out
    temperatures = np.resize(np.array([0, 0.6, 1, 30, 1e38], np.float32), rows)
    seeds = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    positions = rng.integers(0, 4096, rows).astype(np.int32)
    function = jax.jit(lambda *args: kernels.gumbel_argmax(*args, vocab_size=vocab_size, backend=backend()))
    values, ids = (np.asarray(x) for x in function(logits, temperatures, seeds, positions, jnp.int32(start)))
    own = np.arange(start, start + size)
    noise = np.asarray(gumbel_noise(*map(jnp.asarray, (seeds, positions, own))), np.float64)
    scale = np.minimum(temperatures, 1e30)[:, None].astype(np.float64)
    sums = np.where((own < vocab_size) & ~np.isnan(logits), logits + scale * noise, -np.inf)
    picked = np.take_along_axis(sums, (ids - start)[:, None], axis=1)[:, 0]
    error = 2e-5 * np.maximum(1, scale[:, 0])
    assert (picked >= sums.max(axis=1) - error).all()
    np.testing.assert_array_less(np.abs(values - picked) - 1e-6 * np.abs(picked), error)
    greedy = temperatures == 0
    np.testing.assert_array_equal(ids[greedy], start + sums[greedy].argmax(axis=1))


def test_gumbel_argmax_of_a_row_of_nothing_is_its_first_id() -> None:
    arguments = (jnp.full((1, 40), jnp.nan), jnp.ones(1), jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32))
    assert kernels.gumbel_argmax(*arguments, 8, vocab_size=48, backend=backend())[1].tolist() == [8]


def test_gumbel_argmax_at_both_ends_of_the_generator() -> None:
    """Case 15. A search found these seeds: at position 0 the token's random word is 0, or rounds to 2^32. The noise is
    finite all the same, so that the only token that may come does come."""
    seeds, tokens, random_words = [1_343_428, 89_872], [1536, 1932], np.array([0, 0xFFFFFFF0], np.float64)
    logits = np.full((2, 2048), -np.inf, np.float32)
    logits[[0, 1], tokens] = 0
    keys, positions = np.array([[seed, 0] for seed in seeds], np.uint32), np.zeros(2, np.int32)
    function = jax.jit(lambda *args: kernels.gumbel_argmax(*args, vocab_size=2048, backend=backend()))
    values, ids = function(logits, np.ones(2, np.float32), keys, positions, np.int32(0))
    assert ids.tolist() == tokens
    exact = -np.log(-np.log1p(-(random_words + 0.5) / 2**32))
    np.testing.assert_allclose(values, exact, atol=0.2)  # the upper end is kept 2^-24 away from 1
    plain = jax.jit(gumbel_noise)(keys, positions, np.array(tokens, np.int32))
    np.testing.assert_allclose(np.diagonal(plain), exact, atol=0.2)


def test_gumbel_argmax_lowers() -> None:
    shapes = ((256, 151_936), jnp.float32), ((256,), jnp.float32), ((256, 2), jnp.uint32), ((256,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((), jnp.int32))]
    text = cuda_text(lambda *a: kernels.gumbel_argmax(*a, vocab_size=151_936, backend="triton"), arguments)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
