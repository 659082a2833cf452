from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.losses.dppo import dppo_loss


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.15), ("kl", 0.05)])
def test_tokens_that_already_moved_their_way_are_dropped(divergence: str, bound: float) -> None:
    """From 0.3 to 0.6 (too far) and to 0.32; a move against the advantage is never dropped."""
    old_T = torch.tensor([0.3] * 6, dtype=torch.float64).log()
    new = [0.6, 0.6, 0.32, 0.05, 0.05, 0.28]
    advantages_T = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)
    policy_T = torch.tensor(new, dtype=torch.float64).log().requires_grad_()
    loss = dppo_loss(policy_T - old_T, policy_T, old_T, advantages_T, divergence=divergence, clip_low=bound, clip_high=bound)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), policy_T)
    assert loss.is_clipped_T.tolist() == [True, False, False, True, False, False]
    ratios = np.array(new) / 0.3
    expected = np.where(loss.is_clipped_T, 0, -advantages_T.numpy() * ratios)
    np.testing.assert_allclose(grad_T, expected, atol=1e-15)


def test_a_rare_token_is_not_clipped_by_its_ratio_and_its_weight_is_capped() -> None:
    """1e-4 -> 1e-2 is a ratio of 100 but a distance of 0.01."""
    old_T = torch.tensor([1e-4], dtype=torch.float64).log()
    policy_T = torch.tensor([1e-2], dtype=torch.float64).log().requires_grad_()
    loss = dppo_loss(policy_T - old_T, policy_T, old_T, torch.ones(1), divergence="tv", clip_low=0.15, clip_high=0.15)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), policy_T)
    assert grad_T.tolist() == [-20.0] and not loss.is_clipped_T.any()
