"""What a batch-invariant step leaves to XLA on a GPU: nothing whose result depends on an order of summation.

Read from the step's jaxpr, without a GPU: outside of our kernels there is no product and no sum of floats over an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxvllm.config import EngineConfig, ModelConfig
from jaxvllm.core.buckets import Bucket
from jaxvllm.core.knobs import KNOBS
from jaxvllm.core.plan import PlanLayout
from jaxvllm.kernels import resolve_backend
from jaxvllm.models.params import nest
from jaxvllm.models.registry import FAMILIES, param_table
from jaxvllm.runtime.mesh import TP, make_mesh, spmd
from jaxvllm.runtime.processed_step import make_processed_step, make_prompt_logprobs
from jaxvllm.runtime.processors import PROCESSOR_SPECS, processor_shapes
from jaxvllm.runtime.state import STATE_SPECS, state_shapes
from jaxvllm.runtime.step import make_score, make_step

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
KERNELS = {"pallas_call", "mpmd_map"}  # Triton's, Mosaic's
SUMS = {"dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "reduce_prod", "cumsum", "reduce",
        "reduce_window_sum", "cumlogsumexp", "scatter-add", "psum", "psum2", "psum_invariant"}  # fmt: skip


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr's, but for what is inside a kernel."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in KERNELS:
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def float_sums(jaxpr: Any) -> Counter[str]:
    """How often each primitive sums floats (a general reduction that only compares doesn't)."""
    found: Counter[str] = Counter()
    for equation in equations(jaxpr):
        name = equation.primitive.name
        floats = any(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in equation.invars)
        compares = name == "reduce" and all(inner.primitive.name != "add" for inner in equation.params["jaxpr"].eqns)
        if name in SUMS and floats and not compares:
            found[name] += 1
    return found


def sums_of_steps(architecture: str, backend: str, tp: int, *, invariant: bool) -> list[Counter[str]]:
    """Of each function that an engine compiles, for buckets of one and of more tokens."""
    model = ModelConfig(architecture=architecture, vocab_size=1031, hidden_size=64, intermediate_size=128,
                        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                        max_position_embeddings=512)  # fmt: skip
    engine = EngineConfig(max_num_seqs=256, max_num_batched_tokens=256, num_blocks=16, tensor_parallel_size=tp)
    engine, mesh, table = engine.resolve(model), make_mesh(tp), param_table(model, tp=tp)
    backends = resolve_backend(backend, platform="gpu", head_dim=64, block_size=64, dtype="bfloat16",
                               compute_capability="9.0", invariant=invariant)  # fmt: skip
    specs = nest({path: P(*info.axes) for path, info in table.items()})
    params = nest({path: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16) for path, info in table.items()})
    state = state_shapes(model, engine, mesh, 16)
    both = (state, processor_shapes(mesh, 256, model.vocab_size)), (STATE_SPECS, PROCESSOR_SPECS)
    found = []
    for bucket in (Bucket("decode", 1, 1), Bucket("decode", 256, 256), Bucket("ragged", 64, 64)):
        layout = PlanLayout(bucket, 4, 256, 16 * 64)
        knobs = jax.ShapeDtypeStruct((bucket.num_seqs, len(KNOBS)), jnp.int32)
        processed = make_processed_step(layout, model, engine, backends, TP, unroll=True)
        functions: list[Any] = [(make_step(layout, model, backends, TP), state, STATE_SPECS, ()),
                                (processed, *both, (knobs,))]  # fmt: skip
        if bucket.kind == "ragged":
            targets = (jax.ShapeDtypeStruct((bucket.num_tokens,), jnp.int32),)
            score = make_score(layout, model, backends, TP)
            prompt = make_prompt_logprobs(layout, model, engine, backends, TP)
            functions += [(one, state, STATE_SPECS, targets) for one in (score, prompt)]
        for function, states, state_specs, extra in functions:
            mapped = spmd(function, mesh, (specs, state_specs, P(), *(P() for _ in extra)), (state_specs, P()))
            buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
            found.append(float_sums(jax.make_jaxpr(mapped)(params, states, buffer, *extra).jaxpr))
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic", marks=pytest.mark.slow)])
def test_no_sum_is_left_to_xla(architecture: str, backend: str) -> None:
    assert sums_of_steps(architecture, backend, 1, invariant=True) == [Counter()] * 8


def test_over_shards_only_zeros_are_added() -> None:
    """The embedding, and a chosen token's logit: one shard has it, the others zeros. It is exact in any order."""
    for found in sums_of_steps("Qwen3ForCausalLM", "triton", 2, invariant=True):
        assert set(found) <= {"psum", "psum2", "psum_invariant"} and found.total() in (1, 2), found


def test_the_default_has_them() -> None:
    for found in sums_of_steps("Qwen3ForCausalLM", "triton", 1, invariant=False):
        assert found["dot_general"] > 0
