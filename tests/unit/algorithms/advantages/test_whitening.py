from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.advantages.whitening import whiten


@pytest.mark.parametrize(("ddof", "epsilon_on"), [(1, "variance"), (0, "std")])
def test_ranks_agree_with_one_rank_even_when_one_is_empty(ddof: int, epsilon_on: Any, on_ranks: Any) -> None:
    rng = np.random.default_rng(4)
    values_T, mask_T = rng.normal(3.0, 2.0, 40), rng.random(40) < 0.6
    parts = [slice(0, 7), slice(7, 7), slice(7, 40)]

    def work(rank: int, add_up: Any) -> np.ndarray:
        return whiten(values_T[parts[rank]], mask_T[parts[rank]], add_up, ddof=ddof, epsilon_on=epsilon_on)

    ours = np.concatenate(on_ranks(3, work))
    whole = whiten(values_T, mask_T, ddof=ddof, epsilon_on=epsilon_on)
    np.testing.assert_allclose(ours, whole, rtol=1e-12, atol=1e-14)
    assert whole[mask_T].std(ddof=ddof) == pytest.approx(1, rel=1e-6) and not whole[~mask_T].any()


def test_a_large_mean_does_not_cancel() -> None:
    values_T = 1e7 + np.array([0.0, 1, 2, 3])
    expected = (np.arange(4) - 1.5) / np.arange(4).std(ddof=1)
    np.testing.assert_allclose(whiten(values_T, np.ones(4)), expected, rtol=1e-7)


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]])
def test_too_small_a_population_gives_zeros(mask: list[int]) -> None:
    assert not whiten(np.array([1.0, 2.0, 3.0]), np.array(mask)).any()


def test_equal_values_give_zeros_without_a_warning() -> None:
    assert not whiten(np.ones(3), np.ones(3), epsilon=0.0).any()
