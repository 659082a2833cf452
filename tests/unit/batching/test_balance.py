from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.batching.balance import balance_equal_counts, balance_free, compute_costs, list_schedule_makespan


def test_cost_is_linear_plus_attention() -> None:
    lengths = np.array([100, 1000, 4000])
    np.testing.assert_array_equal(compute_costs(lengths), lengths)
    np.testing.assert_allclose(compute_costs(lengths, attention_crossover=1000), [110, 2000, 20000])


@pytest.mark.parametrize("num_samples", [0, 1, 5, 63, 64, 65, 100, 640, 641])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_counts_differ_by_at_most_one_and_nothing_is_lost(num_samples: int, num_ranks: int) -> None:
    costs = np.random.default_rng(num_samples).integers(1, 1000, num_samples).astype(float)
    shares = balance_equal_counts(costs, num_ranks)
    counts = [len(share) for share in shares]
    assert len(shares) == num_ranks and max(counts) - min(counts) <= 1
    assert sorted(np.concatenate(shares).tolist()) == list(range(num_samples))


def test_makespan_is_near_the_mean() -> None:
    costs = np.random.default_rng(3).lognormal(7.0, 0.9, 2048)
    for shares in (balance_equal_counts(costs, 16), balance_free(costs, 16)):
        loads = np.array([costs[share].sum() for share in shares])
        assert loads.max() / loads.mean() < 1.003
    in_order = costs.reshape(16, -1).sum(axis=1)
    assert in_order.max() / in_order.mean() > 1.05


def test_balancing_is_deterministic_with_ties() -> None:
    costs = np.ones(12)
    first, second = balance_equal_counts(costs, 5), balance_equal_counts(costs, 5)
    assert [s.tolist() for s in first] == [s.tolist() for s in second]


def test_longest_first_and_pull_queue_on_a_known_batch() -> None:
    lengths = np.array([200, 220, 240, 260, 300, 1800, 320, 280], dtype=float)
    assert [lengths[share].sum() for share in balance_free(lengths, 3)] == [1800, 820, 1000]
    assert [list_schedule_makespan(lengths, slots) for slots in (1, 2, 4, 8)] == [3620, 2280, 2020, 1800]


def test_pull_queue_keeps_grahams_bound() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        lengths = rng.lognormal(3.0, 1.0, rng.integers(1, 60))
        slots = int(rng.integers(1, 9))
        makespan = list_schedule_makespan(lengths, slots)
        assert makespan <= lengths.sum() / slots + (1 - 1 / slots) * lengths.max() + 1e-9
        assert makespan >= max(lengths.max(), lengths.sum() / slots) - 1e-9
