from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.losses.gmpo import gmpo_loss
from megatron_rl.algorithms.segments import Segments


def test_equals_the_sequence_form_of_the_paper() -> None:
    ids_T = torch.tensor([0, 0, 0, 1, 1])
    mask_T = torch.tensor([True, True, False, True, True])
    segments = Segments(ids_T, mask_T, 2)
    advantages_S = torch.tensor([1.2, -0.6], dtype=torch.float64)
    log_ratio_T = torch.tensor([0.7, -0.1, 9.0, -0.9, 0.2], dtype=torch.float64, requires_grad=True)
    loss = gmpo_loss(log_ratio_T, advantages_S[ids_T], segments, clip_low=0.4, clip_high=0.5)
    ours = (torch.where(mask_T, loss.loss_T, 0.0) / torch.tensor([2, 2, 2, 2, 2])).sum() / 2
    (grad_T,) = torch.autograd.grad(ours, log_ratio_T)

    first = torch.minimum(log_ratio_T[:2], log_ratio_T[:2].clamp(-0.4, 0.5)).mean()
    second = torch.maximum(log_ratio_T[3:], log_ratio_T[3:].clamp(-0.4, 0.5)).mean()
    expected = (-1.2 * torch.exp(first) + 0.6 * torch.exp(second)) / 2
    (expected_grad_T,) = torch.autograd.grad(expected, log_ratio_T)
    np.testing.assert_allclose(float(ours.detach()), float(expected.detach()), rtol=1e-12)
    np.testing.assert_allclose(grad_T, expected_grad_T, rtol=1e-12)
    assert loss.is_clipped_T[mask_T].tolist() == [True, False, True, False]
