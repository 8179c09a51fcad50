"""The training loop around the engine improves its reward."""

from __future__ import annotations

import numpy as np

from tests.kept_programs import kept_programs


def test_the_reward_rises() -> None:
    from rl_loop import train

    with kept_programs(many_steps=True):
        rewards = train(4, learning_rate=2e-3, new_tokens=8)
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
