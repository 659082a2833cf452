from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.advantages.group import (
    batch_scaled_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    leave_one_out_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
    whiten_by_tokens,
)

ONE_OF_FOUR = np.array([1.0, 0, 0, 0])


def test_one_correct_of_four_under_both_deviations() -> None:
    np.testing.assert_allclose(grpo_advantages(ONE_OF_FOUR, ddof=1, epsilon=0), [1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(grpo_advantages(ONE_OF_FOUR, ddof=0, epsilon=0)[:2], [np.sqrt(3), -1 / np.sqrt(3)])
    np.testing.assert_allclose(dr_grpo_advantages(ONE_OF_FOUR), [0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = np.random.default_rng(0).normal(size=7)
    expected = [rewards[i] - np.delete(rewards, i).mean() for i in range(7)]
    np.testing.assert_allclose(rloo_advantages(rewards), expected)


def test_leave_one_out_divides_by_the_deviation_of_the_others() -> None:
    rewards = np.random.default_rng(1).normal(size=6)
    others = [np.delete(rewards, i) for i in range(6)]
    expected = [(r - o.mean()) / (o.std(ddof=1) + 1e-3) for r, o in zip(rewards, others, strict=True)]
    np.testing.assert_allclose(leave_one_out_advantages(rewards, epsilon=1e-3), expected)
    first, *rest = leave_one_out_advantages(ONE_OF_FOUR, epsilon=0)
    assert first == 1.0  # the others are all 0: nothing to divide by
    np.testing.assert_allclose(rest, -(1 / 3) / np.std([1, 0, 0], ddof=1))


def test_a_group_of_one_may_keep_its_reward() -> None:
    alone = np.array([3.0])
    assert grpo_advantages(alone, epsilon=0.5, of_one="reward").tolist() == [2.0]
    for function in (dr_grpo_advantages, rloo_advantages, leave_one_out_advantages):
        assert function(alone, of_one="reward").tolist() == [3.0] and function(alone).tolist() == [0.0]
    assert opo_advantages(alone, np.array([7]), of_one="reward").tolist() == [3.0]
    assert not grpo_advantages(np.array([3.0, 3.0]), of_one="reward").any()


@pytest.mark.parametrize(
    "function",
    [grpo_advantages, dr_grpo_advantages, rloo_advantages, leave_one_out_advantages, pass_at_k_advantages],
)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.1 + 0.2] * 3, [5.0], [-1.0, -1.0]])
def test_a_group_without_difference_is_exactly_zero(function: object, rewards: list[float]) -> None:
    """The deviation of seven times 0.1 is 1e-17, not 0: divided by an epsilon of 0 it would be noise."""
    advantages = function(np.array(rewards))  # type: ignore[operator]
    assert advantages.shape == (len(rewards),) and not advantages.any()


def test_rewards_must_be_finite() -> None:
    with pytest.raises(ValueError, match=r"rewards \[1.0, nan\]"):
        grpo_advantages(np.array([1.0, np.nan]))


def test_length_weighted_baseline() -> None:
    advantages = opo_advantages(np.array([1.0, 0.0]), np.array([30, 10]))
    np.testing.assert_allclose(advantages, [0.25, -0.75])
    assert not opo_advantages(np.array([1.0, 0.0]), np.array([0, 0])).any()


def test_the_best_gets_its_lead_over_the_second() -> None:
    advantages = pass_at_k_advantages(np.array([0.2, 0.9, 0.5]), epsilon=0)
    np.testing.assert_allclose(advantages, [0, 0.4 / np.std([0.2, 0.9, 0.5], ddof=1), 0])


def test_batch_scale_divides_every_group_by_one_deviation() -> None:
    groups = [np.array([1.0, 0.0]), np.array([0.5, 0.5, 0.2])]
    scale = np.concatenate(groups).std(ddof=1)
    scaled = batch_scaled_advantages(groups, epsilon=0)
    for group, ours in zip(groups, scaled, strict=True):
        np.testing.assert_allclose(ours * scale, group - group.mean(), atol=1e-15)
    assert not np.concatenate(batch_scaled_advantages([np.ones(2), np.ones(3)])).any()


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_by_tokens_equals_whitening_the_repeated_values(ddof: int) -> None:
    rng = np.random.default_rng(1)
    values = [rng.normal(size=n) for n in (3, 1, 5)]
    counts = [rng.integers(0, 9, n) for n in (3, 1, 5)]
    repeated = np.repeat(np.concatenate(values), np.concatenate(counts))
    white = whiten_by_tokens(values, counts, ddof=ddof, epsilon=0)
    assert [len(w) for w in white] == [3, 1, 5]
    ours = np.repeat(np.concatenate(white), np.concatenate(counts))
    np.testing.assert_allclose(ours, (repeated - repeated.mean()) / repeated.std(ddof=ddof))


def test_whitening_nothing_or_equal_values_gives_zeros() -> None:
    assert not np.concatenate(whiten_by_tokens([np.array([1.0, 2.0])], [np.array([0, 0])])).any()
    assert not np.concatenate(whiten_by_tokens([np.array([0.3, 0.3])], [np.array([5, 2])], epsilon=0)).any()
