from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.losses.cispo import aipo_loss, cispo_loss, reinforce_loss

OLD_T = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
RATIOS = np.array([0.3, 1.1, 4.0])
ADVANTAGES_T = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def gradient(compute: object) -> tuple[list[float], object]:
    policy_T = (OLD_T + torch.from_numpy(np.log(RATIOS))).requires_grad_()
    loss = compute(policy_T)  # type: ignore[operator]
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), policy_T)
    return grad_T.tolist(), loss


def test_cispo_caps_the_weight_and_keeps_every_gradient() -> None:
    one_sided, loss = gradient(lambda p: cispo_loss(p - OLD_T, p, ADVANTAGES_T, clip_low=1.0, clip_high=1.0))
    np.testing.assert_allclose(one_sided, [-0.3, 2.2, -1.0])
    assert loss.is_clipped_T.tolist() == [False, False, True]
    two_sided, _ = gradient(lambda p: cispo_loss(p - OLD_T, p, ADVANTAGES_T, clip_low=0.2, clip_high=0.28))
    np.testing.assert_allclose(two_sided, [-0.8, 2.2, -0.64])


def test_aipo_weighs_against_the_engine() -> None:
    grad, loss = gradient(lambda p: aipo_loss(p, OLD_T - np.log(2), ADVANTAGES_T, clip_high=1.5))
    np.testing.assert_allclose(grad, [-0.6, 4.4, -1.25])
    np.testing.assert_allclose(loss.ratio_T, 2 * RATIOS)


def test_reinforce_is_minus_a_log_pi() -> None:
    grad, loss = gradient(lambda p: reinforce_loss(p, ADVANTAGES_T))
    assert grad == [-1.0, 2.0, -0.5] and not loss.is_clipped_T.any()
