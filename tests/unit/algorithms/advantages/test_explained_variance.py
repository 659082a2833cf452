from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.advantages.explained_variance import explained_variance

MASK_T = np.array([True, True, False, True, True, True])


def test_perfect_constant_and_wrong_values() -> None:
    returns_T = np.array([1.0, 3.0, 99.0, -2.0, 0.0, 5.0])
    assert explained_variance(returns_T, returns_T, MASK_T) == 1
    assert explained_variance(returns_T + 7, returns_T, MASK_T) == pytest.approx(1)  # a shift explains the variance
    assert explained_variance(np.full(6, 2.0), returns_T, MASK_T) == pytest.approx(0)
    assert explained_variance(-returns_T, returns_T, MASK_T) == pytest.approx(-3)
    half_T = np.where(np.arange(6) == 2, 1e6, 0.5 * returns_T)  # masked tokens do not count
    assert explained_variance(half_T, returns_T, MASK_T) == pytest.approx(0.75)


@pytest.mark.parametrize("returns", [np.zeros(6), np.full(6, 0.1), np.full(6, 1e8 / 3)])
def test_returns_that_do_not_vary_give_zero(returns: np.ndarray) -> None:
    assert explained_variance(np.arange(6.0), returns, MASK_T) == 0
    assert explained_variance(np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool)) == 0


def test_it_runs_over_ranks_and_an_empty_rank_takes_part(on_ranks: Any) -> None:
    rng = np.random.default_rng(4)
    values_T, returns_T = 1e3 + rng.normal(size=(2, 40))
    mask_T = rng.random(40) < 0.7
    whole = explained_variance(values_T, returns_T, mask_T)
    cuts = [0, 3, 3, 29, 40]

    def work(rank: int, add_up: Any) -> float:
        part = slice(cuts[rank], cuts[rank + 1])
        return explained_variance(values_T[part], returns_T[part], mask_T[part], add_up)

    results = on_ranks(4, work)
    assert results == pytest.approx([whole] * 4, rel=1e-9)
    assert len(set(results)) == 1
