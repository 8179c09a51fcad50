"""The training loop around the engine improves its reward."""

from __future__ import annotations

import numpy as np


def test_the_reward_rises() -> None:
    from rl_loop import train

    rewards = train(6, learning_rate=1e-3)
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
