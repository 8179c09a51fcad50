"""REINFORCE: the engine samples, jax.grad learns, the engine gets the new weights, and so on.

The reward of a completion is the share of its tokens that hold an "h", so that learning shows within a few rounds.
Rewards are compared with the mean over the completions of the same prompt (Williams 1992; a baseline as in RLOO).

    python examples/rl_loop.py [rounds]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import token_nats

from jaxvllm import Engine, ModelConfig, SamplingParams
from jaxvllm.convert import load_params
from jaxvllm.models import qwen3
from jaxvllm.tokenizer import Tokenizer

MODEL = Path(__file__).parent / "tiny-kjv"
PROMPTS = ("And the king said", "In the beginning", "Blessed is the man", "And it came to pass")
SAMPLES = 8


def train(rounds: int, learning_rate: float = 3e-4, new_tokens: int = 16) -> list[float]:
    """The mean reward of each round's samples."""
    config, tokenizer = ModelConfig.from_dir(MODEL), Tokenizer.from_dir(MODEL)
    assert tokenizer is not None
    params = load_params(MODEL, qwen3.param_table(config), dtype="float32", put=lambda info, array: jnp.asarray(array))
    optimizer = optax.adam(learning_rate)
    optimizer_state = optimizer.init(params)
    rewarded = np.array(["h" in tokenizer.token_text(token) for token in range(config.vocab_size)])
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, prompts)) + new_tokens

    def loss(params: dict[str, jax.Array], windows: jax.Array, sampled: jax.Array, advantages: jax.Array) -> jax.Array:
        nats = jax.vmap(partial(token_nats, config, params))(windows)  # [B, S - 1]
        return jnp.sum(nats * sampled[:, 1:] * advantages[:, None]) / jnp.sum(sampled)

    @jax.jit
    def learn(params: dict[str, jax.Array], state: optax.OptState, *batch: jax.Array):
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state)
        return optax.apply_updates(params, updates), state

    history = []
    options = {"block_size": 8, "num_blocks": 256, "max_num_seqs": 32, "max_num_batched_tokens": 128,
               "max_model_len": longest, "dtype": "float32", "decode_buckets": (32,), "token_buckets": (128,),
               "enable_processors": False}  # fmt: skip
    with Engine.from_params(config, params, tokenizer=tokenizer, **options) as engine:
        for number in range(rounds):
            wish = SamplingParams(n=SAMPLES, max_tokens=new_tokens, ignore_eos=True, seed=1000 * number)
            samples = engine.generate_ids(prompts, wish)
            rewards = rewarded[samples].mean(axis=2)
            advantages = rewards - rewards.mean(axis=1, keepdims=True)
            windows = np.zeros((len(prompts), SAMPLES, longest), np.int32)
            sampled = np.zeros(windows.shape, np.float32)
            for i, prompt in enumerate(prompts):
                windows[i, :, : len(prompt)] = prompt
                windows[i, :, len(prompt) : len(prompt) + new_tokens] = samples[i]
                sampled[i, :, len(prompt) : len(prompt) + new_tokens] = 1
            batch = [array.reshape(-1, longest) for array in (windows, sampled)]
            params, optimizer_state = learn(params, optimizer_state, *batch, advantages.reshape(-1))
            engine.update_params(params)
            history.append(float(rewards.mean()))
            print(f"round {number}: mean reward {history[-1]:.3f}", flush=True)
    return history


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
