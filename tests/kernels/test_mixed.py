"""Decoding rows among prompt chunks: the result is the oracle's whoever computes them, and who does is sensible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import kernels
from jaxvllm.kernels import mixed_mosaic
from jaxvllm.kernels.prefill_mosaic import prefill_config
from tests.kernels import cases, oracle, test_attention
from tests.kernels.test_lowering import MOSAIC_CALL, TRITON_CALL, arrays, cuda_text
from tests.kernels.test_mosaic_work import table_of

PLAN = ("block_tables", "context_lens", "query_start", "tile_seq", "tile_start")


def check_mixed(case: cases.RaggedCase, backend: str) -> None:
    """As `test_attention.test_ragged`, and arrivals that come back as zeros."""
    inputs = cases.ragged_inputs(case, "bfloat16")
    device, scale = cases.on_device(inputs), inputs["q"].shape[-1] ** -0.5
    arrivals = jnp.zeros((len(inputs["context_lens"]), case.shape.heads[0]), jnp.int32)
    options = {"scale": scale, "query_tile": case.query_tile}
    function = test_attention.compiled.__wrapped__("mixed_attention", backend, **options)  # anew: `_apart` is patched
    plan = tuple(device[name] for name in PLAN)
    got, arrivals = function(device["q"], device["kv"], jnp.int32(cases.LAYER), plan, arrivals)
    plain = {name: value for name, value in inputs.items() if not name.startswith("tile_")}
    test_attention.assert_close(got, oracle.ragged(layer=cases.LAYER, scale=scale, **plain), "bfloat16")
    used = sum(count for count, _ in case.rows)
    assert not np.asarray(got[used:], np.float32).any()
    assert not np.asarray(arrivals).any()


MIXED_CASES = (
    cases.RaggedCase("rows-anywhere", cases.Shape((4, 1), 64, 64), ((1, 9), (70, 100), (1, 700), (1, 1)), 80, 64, 2),
    cases.RaggedCase("rows-alone", cases.Shape((2, 2), 64, 32), ((1, 40), (1, 33)), 4, 64, 1),
    cases.RaggedCase("chunks-alone", cases.Shape((4, 2), 64, 64), ((5, 70), (2, 2)), 16, 64, 1),
)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # Mosaic's: NaN of pad tokens
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("case", MIXED_CASES, ids=lambda case: case.name)
def test_mixed(case: cases.RaggedCase, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_mosaic, "_apart", lambda *_: jnp.bool_(apart))
    check_mixed(case, "mosaic_interpret")


def test_no_more_than_two_launches() -> None:
    batch, tokens = 64, 256
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (batch + 1, tokens // 64 + batch, tokens // 64 + batch)]
    q, kv, layer, *plan = arrays(cases.Shape((32, 8), 128, 64), "bfloat16", tokens, batch, 40)
    arrivals = jax.ShapeDtypeStruct((batch, 32), jnp.int32)
    function = functools.partial(kernels.mixed_attention, scale=0.1, query_tile=64, backend="mosaic")
    text = cuda_text(function, (q, kv, layer, (*plan, *ints), arrivals))
    assert (text.count(MOSAIC_CALL), text.count(TRITON_CALL)) == (1, 1)


ROWS = [(1, 1150)] * 64


@pytest.mark.parametrize(
    ("steps", "apart"),
    [
        ([*ROWS, (704, 704)], True),  # a short prompt leaves nothing idle
        ([*ROWS, (704, 15_000)], False),  # a long one needs one round of programs and a third of another
        ([*ROWS, (704, 8000)], False),
        ([*ROWS, (1, 16_000), (704, 704)], True),  # a long decoding row would be one program's for too long
        ([(704, 704)], False),  # nobody decodes
        ([], False),
    ],
)
def test_who_does_the_decoding_rows(steps: list[tuple[int, int]], apart: bool) -> None:
    config = prefill_config(4, 128, 64, 132)
    assert bool(mixed_mosaic._apart(jnp.asarray(table_of(steps)), 32, config)) is apart
