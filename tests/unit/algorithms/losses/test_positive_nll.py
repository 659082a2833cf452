from __future__ import annotations

import torch

from megatron_rl.algorithms.losses.positive_nll import positive_nll
from megatron_rl.algorithms.segments import Segments
from megatron_rl.types.training import Denominators


def test_trained_tokens_of_correct_rows_over_the_global_count() -> None:
    segments = Segments(torch.tensor([0, 0, 1, 2]), torch.tensor([True, False, True, True]), 3)
    policy_T = torch.tensor([-1.0, -100.0, -2.0, -3.0], requires_grad=True)
    loss = positive_nll(policy_T, torch.tensor([True, False, True]), segments, Denominators(30, 20, 8))
    loss.backward()
    assert float(loss.detach()) == 0.5 and policy_T.grad.tolist() == [-0.125, 0, 0, -0.125]


def test_no_correct_row_anywhere_gives_zero() -> None:
    segments = Segments(torch.tensor([0]), torch.tensor([True]), 1)
    policy_T = torch.tensor([-1.0], requires_grad=True)
    assert float(positive_nll(policy_T, torch.tensor([False]), segments, Denominators(1, 1, 0)).detach()) == 0
