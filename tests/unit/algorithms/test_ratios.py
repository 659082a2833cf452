from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.ratios import log_ratio, sequence_log_ratio, with_token_gradient
from megatron_rl.algorithms.segments import Segments


def test_the_clamp_stops_value_and_gradient() -> None:
    policy_T = torch.tensor([-1.0, -60.0, 50.0], dtype=torch.float64, requires_grad=True)
    ratio_T = log_ratio(policy_T, torch.zeros(3, dtype=torch.float64))
    ratio_T.sum().backward()
    assert ratio_T.tolist() == [-1, -20, 20] and policy_T.grad.tolist() == [1, 0, 0]


def test_sequence_ratio_is_the_mean_over_unmasked_tokens() -> None:
    segments = Segments(torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, True, True]), 2)
    ratios_T = sequence_log_ratio(torch.tensor([1.0, 100, 3, -5]), segments)
    assert ratios_T.tolist() == [2, 2, 2, -5]


def test_a_token_carries_the_gradient_of_its_sequence_value() -> None:
    policy_T = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    value_T = with_token_gradient(torch.tensor([1.5, 0.25], dtype=torch.float64), policy_T)
    value_T.sum().backward()
    np.testing.assert_allclose(value_T.detach(), [1.5, 0.25])
    np.testing.assert_allclose(policy_T.grad, [1.5, 0.25])
