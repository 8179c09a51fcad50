"""The Pallas kernels lower for CUDA, here on the CPU, for the GPU's shapes and odd ones; and the default tunables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxvllm import kernels
from jaxvllm.kernels import decode_mosaic, prefill_mosaic
from jaxvllm.kernels.decode_triton import decode_config, tokens_per_split
from jaxvllm.kernels.prefill_triton import prefill_config
from tests.kernels import cases

DEVICES = {"NVIDIA H200": 132, "NVIDIA A100-SXM4-80GB": 108}
TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"
MOSAIC_CALL = "custom_call @mosaic_gpu_v2"
MOSAIC_CASES = ("wide-head", "narrow-head")  # each costs seconds; AWKWARD has Qwen3's heads
ODD_CASES = ("mha-4", "block1", "block3", "fresh-4", "tile64-many-pads")  # small blocks, tiles larger than the step
DECODE_CASES = [*cases.LARGE_DECODE_CASES, *(c for c in cases.DECODE_CASES if c.name in ODD_CASES)]
RAGGED_CASES = [*cases.LARGE_RAGGED_CASES, *(c for c in cases.RAGGED_CASES if c.name in ODD_CASES)]


def arrays(shape: cases.Shape, dtype: str, tokens: int, batch: int, width: int, layers: int = 36, blocks: int = 999):
    """Abstract q, kv, layer, block_tables, context_lens."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    kv = (layers, 2, blocks, shape.heads[1], shape.block_size, shape.head_dim)
    return (
        jax.ShapeDtypeStruct((tokens, shape.heads[0], shape.head_dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct(kv, jnp.dtype(dtype)),
        ints(()),
        ints((batch, width)),
        ints((batch,)),
    )


def cuda_text(function, arguments, device_kind: str = "NVIDIA H200", **jit_options) -> str:
    """StableHLO of function for a GPU that isn't there."""
    device = AbstractDevice(device_kind=device_kind, num_cores=DEVICES[device_kind], platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(function, **jit_options).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def decode_text(shape: cases.Shape, dtype: str, batch: int, width: int, backend: str = "triton", **options) -> str:
    function = functools.partial(kernels.decode_attention, scale=0.1, backend=backend)
    arrivals = jax.ShapeDtypeStruct((batch, shape.heads[0]), jnp.int32)
    return cuda_text(function, (*arrays(shape, dtype, batch, batch, width), arrivals), **options)


def ragged_text(case: cases.RaggedCase, dtype: str, backend: str = "triton", **options) -> str:
    batch = len(case.rows) + case.pad_seqs
    tiles = case.tokens // case.query_tile + batch
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (batch + 1, tiles, tiles)]
    function = functools.partial(kernels.ragged_attention, scale=0.1, query_tile=case.query_tile, backend=backend)
    return cuda_text(function, (*arrays(case.shape, dtype, case.tokens, batch, 8), *ints), **options)


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda c: c.name)
def test_decode_lowers(case: cases.DecodeCase) -> None:
    text = decode_text(case.shape, "bfloat16", len(case.context_lens), case.width or 8)
    assert text.count(TRITON_CALL) in (1, 2)


@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda c: c.name)
def test_ragged_lowers_to_one_launch(case: cases.RaggedCase) -> None:
    assert ragged_text(case, "bfloat16").count(TRITON_CALL) == 1


AWKWARD = [cases.Shape((16, 8), 128, 64), cases.Shape((1, 1), 64, 256), cases.Shape((5, 1), 64, 16)]
AWKWARD += [cases.Shape((40, 8), 128, 16), cases.Shape((3, 3), 64, 64), cases.Shape((6, 1), 128, 64)]


@pytest.mark.parametrize("shape", AWKWARD, ids=str)
def test_mosaic_ragged_lowers_for_any_heads(shape: cases.Shape) -> None:
    case = cases.RaggedCase("any", shape, ((70, 70), (1, 30)), tokens=128, query_tile=64)
    assert ragged_text(case, "bfloat16", "mosaic").count(MOSAIC_CALL) == 1


@pytest.mark.parametrize("shape", AWKWARD, ids=str)
def test_decode_lowers_to_a_mosaic_launch_and_a_combination(shape: cases.Shape) -> None:
    text = decode_text(shape, "bfloat16", 64, 64, backend="mosaic")
    assert (text.count(MOSAIC_CALL), text.count(TRITON_CALL)) == (1, 1)


def test_runs_are_equal_and_meet_end_to_end() -> None:
    """Cut after cut, the runs' tiles are all tiles of all pairs, each once, in order."""
    lens, heads, count = [100, 0, 64, 1, 2000, 130], 2, 7
    runs, walk = decode_mosaic._runs(jnp.array(lens), heads, count)
    every = [(s, h, t) for s, n in enumerate(lens) for h in range(heads) for t in range(-(-n // 64))]
    sizes = runs[:, 3].tolist()
    assert sum(sizes) == len(every)
    assert max(sizes) - min(sizes) <= 1
    first = [0, *np.cumsum(sizes)[:-1].tolist()]
    assert [tuple(run[:3]) for run in runs.tolist()] == [every[i] for i in first]
    assert runs[1:, 4].tolist() == sizes[:-1]
    for index, (seq, head, *_, until) in enumerate(runs.tolist()):
        assert until == sum(every[i] <= (seq, head, 10**9) for i in first), index
    assert walk.tolist() == [[n, next((j for j in range(i + 1, 6) if lens[j]), 6)] for i, n in enumerate(lens)]


@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_ragged_lowers_to_one_mosaic_launch(name: str) -> None:
    [case] = [c for c in cases.LARGE_RAGGED_CASES if c.name == name]
    assert ragged_text(case, "bfloat16", "mosaic").count(MOSAIC_CALL) == 1


@pytest.mark.parametrize("shape", cases.WRITE_SHAPES, ids=lambda s: f"{s.heads[1]}x{s.head_dim}-{s.block_size}")
def test_write_lowers_to_one_launch_in_place(shape: cases.Shape) -> None:
    q, kv, layer, _, slots = arrays(shape, "bfloat16", 24, 24, 1)
    rows = jax.ShapeDtypeStruct((24, shape.heads[1], shape.head_dim), q.dtype)
    function = functools.partial(kernels.write_kv, backend="triton")
    text = cuda_text(function, (kv, layer, rows, rows, slots), donate_argnums=0)
    assert text.count(TRITON_CALL) == 1
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 4" in text
    assert "tf.aliasing_output = 0" in text or "jax.buffer_donor" in text


@pytest.mark.parametrize("device", DEVICES)
def test_float32_lowers(device: str) -> None:
    shape = cases.Shape((16, 8), 128, 64)
    assert TRITON_CALL in decode_text(shape, "float32", 8, 64, device_kind=device)
    case = cases.RaggedCase("float32", shape, ((100, 100),), 128, 64)
    assert TRITON_CALL in ragged_text(case, "float32", device_kind=device)


def test_decode_is_one_launch_but_for_the_smallest_batch() -> None:
    shape = cases.Shape((16, 8), 128, 64)
    for batch, launches in ((1, 2), (8, 1), (64, 1), (256, 1)):
        text = decode_text(shape, "bfloat16", batch, 64)
        assert text.count(TRITON_CALL) == launches
        assert "output_operand_alias<output_tuple_indices = [1], operand_index = 6" in text  # the arrivals


def test_splits_follow_the_batch_the_machine_and_the_table() -> None:
    config = functools.partial(decode_config, kv_heads=8, head_dim=128, block_size=64, itemsize=2)
    assert [config(batch, width=64, sms=132).max_splits for batch in (1, 8, 64, 256)] == [64, 16, 4, 4]
    assert config(1, width=1, sms=132).max_splits == 1
    assert config(256, width=1024, sms=132).max_splits == 64


@pytest.mark.parametrize(
    ("lens", "tokens"),
    [
        ((64,), 64), ((1024,), 64), ((16384,), 256), ((16384,) * 8, 2048), ((1024,) * 256, 3972 + 60), ((0, 0), 64),
        ((2000,) * 64 + (100,) * 192, 768),  # mixed: three times as many programs
    ],
)  # fmt: skip
def test_a_splits_tokens_deal_the_step_to_the_wanted_programs(lens: tuple[int, ...], tokens: int) -> None:
    config = decode_config(len(lens), 8, 128, 64, 256, 2, 132)
    assert tokens_per_split(jnp.array(lens), 8, config).tolist() == [tokens]


def test_tiles_fit_blocks_and_shared_memory() -> None:
    for head_dim in (16, 64, 128, 256):
        for itemsize in (2, 4):
            for block_size in (1, 3, 16, 64, 128, 256):
                tile = decode_config(4, 2, head_dim, block_size, 8, itemsize, 132).tile
                assert tile >= 16
                assert tile & (tile - 1) == 0
                assert tile * head_dim * itemsize <= 32768
    assert decode_config(400, 8, 128, 64, 8, 2, 132).tile == 64  # a whole block


def test_mosaic_takes_heads_of_one_group_until_two_consumers_have_rows() -> None:
    for group in (1, 2, 4, 5, 6, 8):
        for query_tile in (16, 32, 64, 128):
            heads = prefill_mosaic.prefill_config(group, 128, query_tile, 132).heads
            assert group % heads == 0
            assert heads * query_tile <= 128
    assert prefill_mosaic.prefill_config(2, 128, 64, 132).heads == 2


def test_a_prefill_program_never_mixes_kv_heads() -> None:
    for group in (1, 2, 4, 5, 8):
        assert group % prefill_config(group, 128, 2, 64).heads == 0
