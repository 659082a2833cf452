"""How much a group of G samples can teach, from the probability p that one sample is correct. Pure numpy."""

from __future__ import annotations

import numpy as np


def degenerate_probability(pass_rate: np.ndarray | float, group_size: int) -> np.ndarray:
    """p^G + (1 - p)^G: all samples correct or all wrong, so that every group-relative advantage is 0."""
    pass_rate = np.asarray(pass_rate, dtype=np.float64)
    return pass_rate**group_size + (1.0 - pass_rate) ** group_size


def reward_variance(pass_rate: np.ndarray | float) -> np.ndarray:
    """p (1 - p), the variance of a 0/1 reward: largest at p = 1/2."""
    pass_rate = np.asarray(pass_rate, dtype=np.float64)
    return pass_rate * (1.0 - pass_rate)


def oversampling_factor(degenerate_fraction: np.ndarray | float) -> np.ndarray:
    """1 / (1 - f): groups to generate for each one kept when a fraction f is filtered out (dynamic sampling)."""
    return 1.0 / (1.0 - np.asarray(degenerate_fraction, dtype=np.float64))


def allocate_budget(pass_rates_P: np.ndarray, budget: int, floor: float = 1e-3) -> np.ndarray:
    """Samples per prompt in proportion to p (1 - p) + floor, rounded down, [P]."""
    weights_P = reward_variance(pass_rates_P) + floor
    return np.floor(budget * weights_P / weights_P.sum()).astype(np.int64)
