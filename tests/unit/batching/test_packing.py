from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.batching.packing import compute_lower_bound, pack_first_fit_decreasing, pack_into, round_up


def naive_first_fit_decreasing(lengths: np.ndarray, budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[index] <= budget:
                members.append(index)
                break
        else:
            bins.append([index])
    return bins


def test_first_fit_decreasing_equals_the_plain_loop() -> None:
    rng = np.random.default_rng(11)
    for _ in range(30):
        lengths = rng.integers(1, 100, rng.integers(1, 80))
        assert pack_first_fit_decreasing(lengths, 100) == naive_first_fit_decreasing(lengths, 100)


def test_packing_reaches_the_lower_bound_on_many_samples() -> None:
    lengths = np.clip(np.random.default_rng(2).lognormal(6.0, 0.8, 1500), 8, 8192).astype(int)
    assert len(pack_first_fit_decreasing(lengths, 8192)) == compute_lower_bound(lengths, 8192)


def test_pack_into_gives_the_number_of_bins_that_is_asked_for() -> None:
    rng = np.random.default_rng(13)
    for _ in range(30):
        lengths = rng.integers(1, 60, rng.integers(0, 40))
        num_bins = max(1, len(pack_first_fit_decreasing(lengths, 64))) + int(rng.integers(0, 4))
        bins = pack_into(lengths, lengths.astype(float), 64, num_bins)
        assert len(bins) == num_bins
        assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
        assert all(lengths[members].sum() <= 64 for members in bins if members)


def test_pack_into_evens_out_instead_of_leaving_bins_empty() -> None:
    bins = pack_into(np.array([10, 10, 10, 10, 10]), np.ones(5), budget=50, num_bins=4)
    assert sorted(len(members) for members in bins) == [1, 1, 1, 2]


def test_pack_into_falls_back_when_even_loads_do_not_fit() -> None:
    lengths = np.array([6, 4, 4, 3, 3])  # 6+4 | 4+3+3: longest-first by cost alone puts 6+3 and 4+4 together
    bins = pack_into(lengths, np.array([1.0, 9.0, 9.0, 1.0, 1.0]), budget=10, num_bins=2)
    assert sorted(int(lengths[members].sum()) for members in bins) == [10, 10]


def test_too_long_and_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="item 1 has length 11, more than the budget of 10"):
        pack_first_fit_decreasing(np.array([3, 11]), 10)
    with pytest.raises(ValueError, match="2 bins are needed, 1 were asked for"):
        pack_into(np.array([7, 7]), np.ones(2), 10, 1)


def test_round_up() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
