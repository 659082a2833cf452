from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.losses.token_loss import TokenLoss


def run(ratios: list[float], advantages: list[float], dual_clip: float | None = None) -> tuple[TokenLoss, list[float]]:
    log_ratio_T = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    loss = ppo_loss(log_ratio_T, advantages_T, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), log_ratio_T)
    return loss, grad_T.tolist()


def test_the_side_of_the_advantage_decides_what_is_clipped() -> None:
    loss, grad = run([1.5, 1.5, 0.5, 0.5, 1.1], [1, -1, 1, -1, 2])
    np.testing.assert_allclose(loss.loss_T.detach(), [-1.28, 1.5, -0.5, 0.8, -2.2])
    np.testing.assert_allclose(grad, [0, 1.5, -0.5, 0, -2.2])
    assert loss.is_clipped_T.tolist() == [True, False, False, True, False]
    np.testing.assert_allclose(loss.ratio_T, [1.5, 1.5, 0.5, 0.5, 1.1])


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    loss, grad = run([5.0, 5.0, 2.0], [-1, 1, -1], dual_clip=3.0)
    np.testing.assert_allclose(loss.loss_T.detach(), [3.0, -1.28, 2.0])
    np.testing.assert_allclose(grad, [0, 0, 2.0])
    assert loss.is_clipped_T.tolist() == [True, True, False]


def test_the_clip_flag_says_where_the_gradient_is_gone() -> None:
    rng = np.random.default_rng(0)
    ratios, advantages = np.exp(rng.normal(size=500)), rng.normal(size=500)
    loss, grad = run(ratios.tolist(), advantages.tolist(), dual_clip=2.0)
    np.testing.assert_array_equal(loss.is_clipped_T.numpy(), np.array(grad) == 0)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_on_policy_value_is_minus_the_advantage(advantage: float) -> None:
    loss, grad = run([1.0], [advantage])
    assert loss.loss_T.tolist() == [-advantage] and grad == [-advantage] and not loss.is_clipped_T.any()
