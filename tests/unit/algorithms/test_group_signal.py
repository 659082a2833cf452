from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.group_signal import (
    allocate_budget,
    degenerate_probability,
    oversampling_factor,
    reward_variance,
)


def test_degenerate_groups_by_simulation() -> None:
    rewards = np.random.default_rng(0).random((40_000, 8)) < 0.8
    simulated = np.mean(rewards.all(axis=1) | ~rewards.any(axis=1))
    assert float(degenerate_probability(0.8, 8)) == pytest.approx(simulated, abs=0.01)
    assert float(degenerate_probability(0.5, 8)) == 1 / 128


def test_oversampling_replaces_what_is_filtered() -> None:
    assert float(oversampling_factor(0.35)) * (1 - 0.35) == pytest.approx(1)


def test_budget_follows_the_variance() -> None:
    assert allocate_budget(np.array([0.1, 0.5, 0.9, 1.0]), 1000).tolist() == [209, 578, 209, 2]
    assert reward_variance(np.array([0.0, 0.5, 1.0])).tolist() == [0, 0.25, 0]
