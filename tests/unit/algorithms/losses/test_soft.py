from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.losses.soft import sapo_loss, vespo_loss, vespo_phi
from megatron_rl.algorithms.segments import Segments


def test_sapo_weight_is_one_on_policy_and_fades_on_both_sides() -> None:
    log_ratio_T = torch.tensor([0.0, 1.5, -1.5, 0.0], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([1.0, 1, 1, -1], dtype=torch.float64)
    (grad_T,) = torch.autograd.grad(sapo_loss(log_ratio_T, advantages_T).loss_T.sum(), log_ratio_T)
    weights = -grad_T / advantages_T
    assert weights[0] == pytest.approx(1) and weights[3] == pytest.approx(1)
    assert weights[1] < np.exp(1.5) and weights[2] < np.exp(-1.5)


def test_vespo_phi_is_one_on_policy_and_depends_on_the_sign() -> None:
    segments = Segments(torch.tensor([0, 0, 1, 2]), torch.ones(4, dtype=torch.bool), 3)
    zeros_T = torch.zeros(4, dtype=torch.float64)
    np.testing.assert_allclose(vespo_phi(zeros_T, zeros_T, segments), np.ones(3))
    log_ratio_T = torch.tensor([0.2, 0.3, 0.5, 0.5], dtype=torch.float64)
    phi_S = vespo_phi(log_ratio_T, torch.tensor([1.0, 1, -1, 0]), segments)
    weight = np.exp(0.5)
    np.testing.assert_allclose(phi_S, [np.exp(3 + 1 - 3 * weight), np.exp(2 + 1.5 - 2 * weight), np.exp(4 - 3 * weight)])


def test_vespo_weighs_log_pi_by_the_rows_phi() -> None:
    segments = Segments(torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool), 2)
    policy_T = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    log_ratio_T = policy_T + torch.tensor([1.1, 2.2, 2.9], dtype=torch.float64)
    advantages_T = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    loss = vespo_loss(log_ratio_T, policy_T, advantages_T, segments)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), policy_T)
    phi_S = vespo_phi(log_ratio_T, advantages_T, segments)
    np.testing.assert_allclose(grad_T, -phi_S[[0, 0, 1]] * advantages_T)
