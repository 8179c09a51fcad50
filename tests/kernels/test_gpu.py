"""The tables on a real GPU, compiled, Triton and XLA, bfloat16 and float32; and larger shapes than a CPU would bear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels import decode_triton, mixed_mosaic, prefill_triton
from tests.kernels import cases, test_api, test_attention, test_mixed

pytestmark = pytest.mark.gpu

BACKENDS = ("xla", "triton")
DTYPES = ("float32", "bfloat16")
XLA_CASES = ("ratio2-16", "dim40-16", "prefix-16", "qwen3-0.6b", "wide-head")  # each costs seconds to compile


def params(small, large) -> list:
    """(case, dtype, backend): all cases with triton, small ones in float32 only; some with xla."""
    out = []
    for case in (*small, *large):
        for dtype in DTYPES:
            fits_triton = test_attention.supports("triton", case.shape.head_dim)
            if fits_triton and (case in large or dtype == "float32" or case.name in test_attention.HALF_CASES):
                out.append((case, dtype, "triton"))
            if case.name in XLA_CASES:
                out.append((case, dtype, "xla"))
    return out


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    params(cases.DECODE_CASES, cases.LARGE_DECODE_CASES),
    ids=lambda p: getattr(p, "name", p),
)
def test_decode(case: cases.DecodeCase, dtype: str, backend: str) -> None:
    got, want = test_attention.run_decode(cases.decode_inputs(case, dtype), backend)
    test_attention.assert_close(got, want, dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    params(cases.RAGGED_CASES, cases.LARGE_RAGGED_CASES),
    ids=lambda p: getattr(p, "name", p),
)
def test_ragged(case: cases.RaggedCase, dtype: str, backend: str) -> None:
    got, want = test_attention.run_ragged(cases.ragged_inputs(case, dtype), case.query_tile, backend)
    test_attention.assert_close(got, want, dtype)
    used = sum(count for count, _ in case.rows)
    assert not np.asarray(got[used:], np.float32).any()


@pytest.mark.parametrize(
    "case", [*cases.MOSAIC_DECODE_CASES, *(c for c in cases.LARGE_DECODE_CASES if c.shape.head_dim in (64, 128))],
    ids=lambda c: c.name,
)  # fmt: skip
def test_decode_by_mosaic(case: cases.DecodeCase) -> None:
    test_decode(case, "bfloat16", "mosaic")


@pytest.mark.parametrize("case", [*cases.MOSAIC_CASES, *cases.LARGE_RAGGED_CASES], ids=lambda c: c.name)
def test_ragged_by_mosaic(case: cases.RaggedCase) -> None:
    test_ragged(case, "bfloat16", "mosaic")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("case", [*test_mixed.MIXED_CASES, *cases.LARGE_RAGGED_CASES], ids=lambda c: c.name)
def test_mixed_by_mosaic(case: cases.RaggedCase, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_mosaic, "_apart", lambda *_: jnp.bool_(apart))
    test_mixed.check_mixed(case, "mosaic")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*cases.WRITE_SHAPES, cases.Shape((8, 8), 128, 64)], ids=str)
def test_write_drops_and_touches_nothing_else(shape: cases.Shape, dtype: str, backend: str) -> None:
    test_attention.check_write(cases.write_inputs(shape, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_donated_cache_is_updated_in_place(backend: str) -> None:
    compiled, kv = test_api.compiled_step(backend, cases.RAGGED_CASES[1], "bfloat16")
    assert not test_api.cache_sized_copies(compiled.as_text(), kv)
    memory = compiled.memory_analysis()
    assert memory
    assert memory.alias_size_in_bytes >= kv.size * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("splits", "programs", "tile"), [(1, 99, 32), (2, 9999, 16), (16, 100, 64), (64, 9999, 16)])
def test_every_split_and_tile_gives_the_same(splits: int, programs: int, tile: int, fused: bool, dtype: str) -> None:
    """Tunables change speed only: also more splits than tiles, tiles of a part of a block and of several."""
    case = cases.DecodeCase("tunables", cases.Shape((16, 8), 64, 32), (1, 0, 33, 500, 64), width=20)
    inputs = cases.decode_inputs(case, dtype)
    _, want = test_attention.run_decode(inputs, "xla")
    config = decode_triton.DecodeConfig(splits, (programs, programs), 1, tile, 2, 2, fused)
    device = cases.on_device(inputs)
    got, arrivals = decode_triton.decode_attention(layer=cases.LAYER, scale=64**-0.5, config=config, **device)
    test_attention.assert_close(got, want, dtype)
    assert not np.asarray(arrivals).any()


@pytest.mark.parametrize(("heads", "tile"), [(1, 16), (2, 64), (1, 128)])
def test_every_prefill_tile_gives_the_same(heads: int, tile: int) -> None:
    case = cases.RaggedCase("tunables", cases.Shape((8, 2), 64, 64), ((130, 300), (5, 5)), 192, 64)
    inputs = cases.ragged_inputs(case, "bfloat16")
    _, want = test_attention.run_ragged(inputs, case.query_tile, "xla")
    config = prefill_triton.PrefillConfig(heads, tile, num_warps=4, num_stages=2)
    device = cases.on_device(inputs)
    got = prefill_triton.ragged_attention(
        layer=cases.LAYER, scale=64**-0.5, query_tile=case.query_tile, config=config, **device
    )
    test_attention.assert_close(got, want, "bfloat16")


def test_a_cache_beyond_4_gib_is_addressed_right() -> None:
    """Offsets need 64 bits there; only the last layer and the last blocks are used."""
    layers, blocks, block_size, heads, head_dim = 40, 4096, 64, 2, 64
    kv = jnp.zeros((layers, 2, blocks, heads, block_size, head_dim), jnp.bfloat16)
    assert kv.nbytes > 2**32
    keys = jax.random.normal(jax.random.key(0), (64, heads, head_dim), jnp.bfloat16)
    slots = jnp.arange(64, dtype=jnp.int32) + (blocks - 1) * block_size
    layer = jnp.int32(layers - 1)
    write = test_attention.compiled("write_kv", "triton")
    kv = write(kv=kv, layer=layer, k=keys, v=-keys, slot_mapping=slots)
    q = jax.random.normal(jax.random.key(1), (1, 4, head_dim), jnp.bfloat16)
    plan = {"block_tables": jnp.array([[blocks - 1]], jnp.int32), "context_lens": jnp.array([64], jnp.int32)}
    plan["arrivals"] = jnp.zeros((1, 4), jnp.int32)
    got, _ = test_attention.compiled("decode_attention", "triton", scale=0.125)(q=q, kv=kv, layer=layer, **plan)
    small = jnp.stack([keys, -keys]).swapaxes(1, 2)[None, :, None]  # [1, 2, 1, Hkv, P, D]
    plan["block_tables"] = jnp.zeros((1, 1), jnp.int32)
    reference = test_attention.compiled("decode_attention", "reference", scale=0.125)
    want, _ = reference(q=q, kv=small, layer=jnp.int32(0), **plan)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=1e-2)
    assert not np.asarray(kv[:, :, : blocks - 1].any())
