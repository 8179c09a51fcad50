"""What a batch-invariant step leaves to XLA: nothing whose result depends on an order of summation.

Read from the step's jaxpr, without a GPU: outside of our kernels there is no product and no sum of floats over an axis;
in plain jax, none over more than one row at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import DRAW
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import resolve_backend
from jaxvllm.models.params import nest
from jaxvllm.models.registry import FAMILIES, param_table
from jaxvllm.runtime import step as steps
from jaxvllm.runtime.mesh import TP, make_mesh, spmd
from jaxvllm.runtime.processors import PROCESSOR_SPECS, processor_shapes
from jaxvllm.runtime.redraw import make_redraw
from jaxvllm.runtime.state import STATE_SPECS, logits_shape, state_shapes
from jaxvllm.runtime.step import make_prompt_logprobs, make_score, make_step

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
KERNELS = {"pallas_call", "mpmd_map"}  # Triton's, Mosaic's
SUMS = {"dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "reduce_prod", "cumsum", "reduce",
        "reduce_window_sum", "cumlogsumexp", "scatter-add", "psum", "psum2", "psum_invariant"}  # fmt: skip
FUNCTIONS = {"exp", "exp2", "log", "log1p", "logistic", "tanh", "sin", "cos", "rsqrt", "sqrt", "pow"}
BUCKETS = Bucket("decode", 1, 1), Bucket("decode", 256, 256), Bucket("ragged", 64, 64)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr's, but for what is inside a kernel."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in KERNELS:
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def float_sums(jaxpr: Any, sizes: Collection[int] = ()) -> Counter[str]:
    """How often each primitive sums floats (a general reduction that only compares doesn't).

    sizes: only sums in whose shapes there is one of these.
    """
    found: Counter[str] = Counter()
    for equation in equations(jaxpr):
        name = equation.primitive.name
        floats = any(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in equation.invars)
        compares = name == "reduce" and all(inner.primitive.name != "add" for inner in equation.params["jaxpr"].eqns)
        if name in SUMS and floats and not compares and (not sizes or extents(equation) & set(sizes)):
            found[name] += 1
    return found


def words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def elementwise(jaxpr: Any, sizes: Collection[int] = ()) -> Counter[str]:
    """How often each function of single floats is left to XLA."""
    found = (equation for equation in equations(jaxpr) if not sizes or extents(equation) & set(sizes))
    return Counter(equation.primitive.name for equation in found if equation.primitive.name in FUNCTIONS)


def extents(equation: Any) -> set[int]:
    """Of all axes of what goes in and comes out."""
    return {extent for var in (*equation.invars, *equation.outvars) for extent in var.aval.shape}


def sums_of_steps(architecture: str, backend: str, tp: int, *, invariant: bool, buckets: Sequence[Bucket] = BUCKETS,
                  count: Callable[[Any], Counter[str]] = float_sums) -> list[Counter[str]]:  # fmt: skip
    """Of each function that an engine compiles, for buckets of one and of more tokens."""
    model = ModelConfig(architecture=architecture, vocab_size=1031, hidden_size=64, intermediate_size=128,
                        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                        max_position_embeddings=512)  # fmt: skip
    engine = EngineConfig(max_num_seqs=256, max_num_batched_tokens=256, num_blocks=16, tensor_parallel_size=tp)
    engine, mesh, table = engine.resolve(model), make_mesh(tp), param_table(model, tp=tp)
    platform = "cpu" if backend == "xla" else "gpu"
    backends = resolve_backend(backend, platform=platform, head_dim=64, block_size=64, dtype="bfloat16",
                               compute_capability="9.0", invariant=invariant)  # fmt: skip
    specs = nest({path: P(*info.axes) for path, info in table.items()})
    params = nest({path: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16) for path, info in table.items()})
    state = state_shapes(model, engine, mesh, 16)
    cache, vocabulary = STATE_SPECS, P(None, TP)
    found = []

    def look(function: Any, in_specs: Any, out_specs: Any, *arguments: Any) -> None:
        found.append(count(jax.make_jaxpr(spmd(function, mesh, in_specs, out_specs))(*arguments).jaxpr))

    for bucket in buckets:
        layout = PlanLayout(bucket, 4, 256, 16 * 64)
        logits, buffer = logits_shape(model.vocab_size, mesh, bucket.num_seqs), words(layout.size)
        step = make_step(layout, model, backends, TP)
        look(step, (specs, cache, vocabulary, P()), (cache, vocabulary, P()), params, state, logits, buffer)
        redraw = make_redraw(model, engine, backends, TP, unroll=True)
        states, both = (state.last_tokens, processor_shapes(mesh, 256, model.vocab_size)), (P(), PROCESSOR_SPECS)
        look(redraw, (both, vocabulary, P()), (both, P()), states, logits, words(bucket.num_seqs, len(DRAW)))
        if bucket.kind == "ragged":
            for function in (make_score(layout, model, backends, TP),
                             make_prompt_logprobs(layout, model, engine, backends, TP)):  # fmt: skip
                look(function, (specs, cache, P(), P()), (cache, P()), params, state, buffer, words(bucket.num_tokens))
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic", marks=pytest.mark.slow)])
def test_no_sum_is_left_to_xla(architecture: str, backend: str) -> None:
    """Nor functions of single floats: XLA fuses them with what is beside them, and how depends on the step's size."""

    def both(jaxpr: Any) -> Counter[str]:
        return float_sums(jaxpr) + elementwise(jaxpr)

    assert sums_of_steps(architecture, backend, 1, invariant=True, count=both) == [Counter()] * 8


def test_over_shards_only_zeros_are_added() -> None:
    """The embedding, and a chosen token's logit: one shard has it, the others zeros. It is exact in any order."""
    for found in sums_of_steps("Qwen3ForCausalLM", "triton", 2, invariant=True):
        assert set(found) <= {"psum", "psum2", "psum_invariant"} and found.total() in (1, 2), found


def test_the_default_has_them() -> None:
    redraws = (1, 3, 5)  # without the model, so without products
    for place, found in enumerate(sums_of_steps("Qwen3ForCausalLM", "triton", 1, invariant=False)):
        assert found["dot_general"] > 0 or (place in redraws and found.total() > 0)


def test_elsewhere_every_sum_is_of_one_row() -> None:
    """In plain jax: the extents of the steps, which no other axis of this model has, are in no sum's shapes, nor in
    those of functions that XLA fuses."""
    tokens, seqs = sizes = 192, 24
    buckets = Bucket("decode", seqs, seqs), Bucket("ragged", tokens, seqs)

    def both(jaxpr: Any) -> Counter[str]:
        return float_sums(jaxpr, sizes) + elementwise(jaxpr, sizes)

    sums = partial(sums_of_steps, "Qwen3ForCausalLM", "xla", 1, count=both)
    assert sums(invariant=True, buckets=buckets) == [Counter()] * 6
    assert all(found.total() > 0 for found in sums(invariant=False, buckets=buckets[:1]))


def test_all_attention_is_the_invariant_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In decode steps, too: the other kernels split a context by the number of sequences."""
    asked: list[bool] = []
    ragged = steps.ragged_attention

    def noted(*args: Any, invariant: bool = False, **options: Any) -> jax.Array:
        asked.append(invariant)
        return ragged(*args, invariant=invariant, **options)

    monkeypatch.setattr(steps, "ragged_attention", noted)
    monkeypatch.setattr(steps, "decode_attention", None)
    sums_of_steps("LlamaForCausalLM", "triton", 1, invariant=True, buckets=BUCKETS[1:])
    assert asked == [True] * 4  # the layers' loop, traced once in each of four forwards
