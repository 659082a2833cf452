from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.losses.gspo import gspo_loss, gspo_token_loss
from megatron_rl.algorithms.segments import Segments

IDS_T = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
MASK_T = torch.tensor([True, True, False, True, True, True, True, True, True])
SEGMENTS = Segments(IDS_T, MASK_T, 3)
OLD_T = torch.tensor([-1.0, -0.5, -7, -2, -0.3, -1.2, -0.8, -0.1, -3], dtype=torch.float64)
SHIFT_T = torch.tensor([0.2, 0.1, 5, -0.3, 0.1, 0.6, 0.5, 0.4, 0.7], dtype=torch.float64)
ADVANTAGES_S = torch.tensor([1.5, -0.7, 0.4], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def row_mean_of_rows(loss_T: torch.Tensor) -> torch.Tensor:
    counts_T = SEGMENTS.spread(SEGMENTS.counts_S)
    return (torch.where(MASK_T, loss_T, 0.0) / counts_T).sum() / 3


def test_value_and_gradient_equal_the_sequence_form_of_the_paper() -> None:
    policy_T = (OLD_T + SHIFT_T).requires_grad_()
    loss = gspo_loss(policy_T - OLD_T, policy_T, ADVANTAGES_S[IDS_T], SEGMENTS, **CLIP)
    (grad_T,) = torch.autograd.grad(row_mean_of_rows(loss.loss_T), policy_T)

    terms = []
    for s in range(3):
        rows = (IDS_T == s) & MASK_T
        ratio = torch.exp((policy_T - OLD_T)[rows].mean())
        terms.append(-torch.minimum(ratio * ADVANTAGES_S[s], ratio.clamp(0.8, 1.28) * ADVANTAGES_S[s]))
    expected = torch.stack(terms).mean()
    (expected_grad_T,) = torch.autograd.grad(expected, policy_T)

    np.testing.assert_allclose(float(row_mean_of_rows(loss.loss_T).detach()), float(expected.detach()), rtol=1e-12)
    np.testing.assert_allclose(grad_T, expected_grad_T, rtol=1e-12)
    assert loss.is_clipped_T.tolist() == [False] * 5 + [True] * 4  # a row is clipped whole: 1.73 > 1.28


def test_a_masked_token_does_not_enter_the_ratio() -> None:
    policy_T = (OLD_T + SHIFT_T).requires_grad_()
    loss = gspo_loss(policy_T - OLD_T, policy_T, ADVANTAGES_S[IDS_T], SEGMENTS, **CLIP)
    np.testing.assert_allclose(loss.ratio_T[:2], np.exp([0.15, 0.15]))


def test_gspo_token_keeps_the_advantage_of_each_token() -> None:
    policy_T = (OLD_T + SHIFT_T).requires_grad_()
    advantages_T = torch.linspace(-1, 1, 9, dtype=torch.float64)
    loss = gspo_token_loss(policy_T - OLD_T, policy_T, advantages_T, SEGMENTS, clip_low=0.9, clip_high=9)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), policy_T)
    np.testing.assert_allclose(grad_T, -advantages_T * loss.ratio_T)
    row = gspo_loss(policy_T - OLD_T, policy_T, advantages_T, SEGMENTS, clip_low=0.9, clip_high=9)
    np.testing.assert_allclose(row.loss_T[:2].detach(), -loss.ratio_T[:2] * advantages_T[:2].mean())
