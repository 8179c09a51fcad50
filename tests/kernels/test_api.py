"""The folder's API: which backend resolves where, and calls that are refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from jaxvllm.kernels.backends import implementation
from tests.kernels import cases

H200 = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": "9.0"}


def resolve(name: str, **changes) -> kernels.ResolvedBackends:
    options = {"head_dim": 128, "block_size": 64, "dtype": "bfloat16", **H200} | changes
    return kernels.resolve_backend(name, **options)


def names(resolved: kernels.ResolvedBackends) -> tuple[str, str, str]:
    return resolved.write_kv, resolved.decode_attention, resolved.ragged_attention


def test_auto_is_what_measures_best_on_a_gpu_and_xla_on_a_cpu() -> None:
    assert names(resolve("auto")) == ("triton", "triton", "mosaic")
    assert names(resolve("auto", dtype="float32")) == ("triton", "triton", "triton")
    on_ampere = resolve("mosaic", device_kind="NVIDIA A100", compute_capability="8.0")
    assert names(on_ampere) == ("triton", "triton", "triton")
    assert "instead of mosaic for decode_attention, ragged_attention on NVIDIA A100" in on_ampere.reason
    on_cpu = resolve("auto", platform="cpu", device_kind="cpu", compute_capability="")
    assert names(on_cpu) == ("xla", "xla", "xla")
    assert "need a GPU" in on_cpu.reason


@pytest.mark.parametrize("name", ["reference", "xla", "triton", "triton_interpret"])
def test_a_backend_that_fits_is_taken_as_asked(name: str) -> None:
    resolved = resolve(name)
    assert names(resolved) == (name, name, name)
    assert resolved.reason == ""


@pytest.mark.parametrize("head_dim", [40, 8, 512])
def test_an_unfit_head_dim_gives_xla_attention_and_says_why(head_dim: int) -> None:
    resolved = resolve("triton", head_dim=head_dim)
    assert names(resolved) == ("triton", "xla", "xla")
    assert str(head_dim) in resolved.reason
    assert "decode_attention, ragged_attention" in resolved.reason
    assert "NVIDIA H200" in resolved.reason


def test_an_old_gpu_gives_xla() -> None:
    resolved = resolve("auto", device_kind="Tesla T4", compute_capability="7.5")
    assert names(resolved) == ("xla", "xla", "xla")
    assert "7.5" in resolved.reason


def test_mosaic_has_the_attention_of_a_hopper_and_leaves_the_write_to_triton() -> None:
    resolved = resolve("mosaic")
    assert names(resolved) == ("triton", "mosaic", "mosaic")
    assert resolved.reason == ""
    assert names(resolve("mosaic_interpret", platform="cpu")) == (
        "triton_interpret",
        "mosaic_interpret",
        "mosaic_interpret",
    )
    with pytest.raises(ValueError, match="write_kv: backend 'mosaic' has no such kernel"):
        implementation("write_kv", "mosaic")


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"head_dim": 32}, {"block_size": 8}, {"compute_capability": "10.0"}], ids=str
)
def test_what_mosaic_refuses_triton_does_and_says_why(changes: dict) -> None:
    resolved = resolve("mosaic", **changes)
    assert names(resolved) == ("triton", "triton", "triton")
    lost = "decode_attention, ragged_attention on NVIDIA H200"
    assert f"triton instead of mosaic for {lost}: the mosaic kernel" in resolved.reason
    assert str(*changes.values()) in resolved.reason


def test_mosaic_without_a_gpu_gives_xla() -> None:
    resolved = resolve("mosaic", platform="cpu", device_kind="cpu", compute_capability="")
    assert names(resolved) == ("xla", "xla", "xla")
    assert "xla instead of mosaic for decode_attention, ragged_attention" in resolved.reason


def test_a_wide_head_keeps_the_mosaic_prefill() -> None:
    resolved = resolve("mosaic", head_dim=256)
    assert names(resolved) == ("triton", "triton", "mosaic")
    assert "triton instead of mosaic for decode_attention" in resolved.reason


def test_unknown_names_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_backend is 'flash'.*'auto'.*'xla'"):
        resolve("flash")
    with pytest.raises(ValueError, match="dtype is float16"):
        resolve("auto", dtype="float16")
    with pytest.raises(ValueError, match="block_size is 0"):
        resolve("auto", block_size=0)


def test_auto_is_not_a_concrete_backend() -> None:
    inputs = cases.decode_inputs(cases.DECODE_CASES[0], "float32")
    with pytest.raises(ValueError, match=r"backend is 'auto'.*resolve_backend"):
        kernels.decode_attention(layer=0, scale=1.0, backend="auto", **inputs)


def test_all_wrong_arguments_are_listed_at_once() -> None:
    inputs = cases.ragged_inputs(cases.RAGGED_CASES[0], "float32")
    inputs |= {
        "q": inputs["q"][:, :, :8],
        "context_lens": inputs["context_lens"].astype(np.uint32),
        "query_start": inputs["query_start"][1:],
    }
    call = functools.partial(kernels.ragged_attention, layer=0, scale=1.0, backend="xla", **inputs)
    message = "q is float32.*context_lens is uint32.*query_start is int32.*query_tile is 0"
    with pytest.raises(ValueError, match=message):
        call(query_tile=0)


def test_a_cache_of_another_shape_or_dtype_is_refused() -> None:
    shape = cases.WRITE_SHAPES[0]
    inputs = cases.write_inputs(shape, "float32")
    with pytest.raises(ValueError, match=re.escape("kv has shape (2, 5, 2, 4, 16)")):
        kernels.write_kv(layer=0, backend="xla", **{**inputs, "kv": inputs["kv"][0]})
    with pytest.raises(ValueError, match="kv has dtype float16"):
        kernels.write_kv(layer=0, backend="xla", **{**inputs, "kv": inputs["kv"].astype(np.float16)})
    with pytest.raises(ValueError, match=r"k is bfloat16.*has to be float32"):
        kernels.write_kv(layer=0, backend="xla", **{**inputs, "k": inputs["k"].astype(jnp.bfloat16)})


def test_the_triton_kernel_refuses_an_odd_query_tile() -> None:
    inputs = cases.ragged_inputs(cases.RAGGED_CASES[0], "float32")
    with pytest.raises(ValueError, match="query_tile is 24"):
        kernels.ragged_attention(layer=0, scale=1.0, query_tile=24, backend="triton_interpret", **inputs)


def compiled_step(backend: str, case: cases.RaggedCase, dtype: str, *, chained: bool = True):
    """Three layers of write, ragged and decode attention over one donated cache, compiled; and the cache's shape.

    Not chained: a layer's keys don't depend on the layer before, as a model's do.
    """
    inputs = cases.on_device(cases.ragged_inputs(case, dtype))
    ops = {name: getattr(kernels, name) for name in ("write_kv", "ragged_attention", "decode_attention")}
    heads, tokens = case.shape.heads[1], case.tokens
    slots = jnp.arange(tokens, dtype=jnp.int32)

    def step(kv, q):
        first = q
        for layer in range(3):
            k = (q if chained else first)[:, :heads] * 0.5
            kv = ops["write_kv"](kv, layer, k, k, slots, backend=backend)
            plan = [inputs[n] for n in ("block_tables", "context_lens", "query_start", "tile_seq", "tile_start")]
            options = {"scale": 0.2, "backend": backend}
            q = ops["ragged_attention"](q, kv, layer, *plan, query_tile=case.query_tile, **options)
            rows = q[: len(plan[1])]
            rows, _ = ops["decode_attention"](rows, kv, layer, *plan[:2], jnp.zeros(rows.shape[:2], int), **options)
            q = q.at[: len(plan[1])].set(rows)
        return kv, q

    kv = jax.ShapeDtypeStruct((3, 2, 64, *inputs["kv"].shape[3:]), jnp.dtype(dtype))
    return jax.jit(step, donate_argnums=0).lower(kv, inputs["q"]).compile(), kv


def cache_sized_copies(text: str | None, kv: jax.ShapeDtypeStruct) -> list[str]:
    """Copies, plain or wrapped in a fusion, of an array of the cache's shape or one of its flattened forms."""
    assert text
    flat = (kv.shape[0] * 2, *kv.shape[2:]), (kv.shape[0] * 2 * kv.shape[2], *kv.shape[3:])
    shapes = "|".join(",".join(map(str, shape)) for shape in (kv.shape, *flat))
    results = re.findall(rf"^\s*(?:ROOT )?(\S+) = \(?\w+\[(?:{shapes})\]\S* (\S+?)\(", text, re.MULTILINE)
    assert results  # the cache is there under one of these shapes
    return [f"{name}: {op}" for name, op in results if "copy" in name or "copy" in op]


def test_the_xla_path_updates_a_donated_cache_in_place() -> None:
    compiled, kv = compiled_step("xla", cases.RAGGED_CASES[1], "float32")
    assert not cache_sized_copies(compiled.as_text(), kv)
    memory = compiled.memory_analysis()
    assert memory
    assert memory.alias_size_in_bytes >= kv.size * 4
    assert memory.temp_size_in_bytes < kv.size * 4


def test_a_copy_would_be_seen() -> None:
    """Layers that aren't chained force XLA to copy the cache: the check of the test above finds that."""
    compiled, kv = compiled_step("xla", cases.RAGGED_CASES[1], "float32", chained=False)
    assert cache_sized_copies(compiled.as_text(), kv)
