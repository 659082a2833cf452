from __future__ import annotations

import torch

from megatron_rl.algorithms.losses.value import is_value_clipped, value_loss


def test_the_worse_of_clipped_and_unclipped_counts() -> None:
    values_T = torch.tensor([1.0, 2.0, 0.6, -3.0], dtype=torch.float64, requires_grad=True)
    old_T = torch.zeros(4, dtype=torch.float64)
    returns_T = torch.tensor([5.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    loss_T = value_loss(values_T, old_T, returns_T, clip=0.5)
    torch.testing.assert_close(loss_T.detach(), torch.tensor([0.5 * 4.5**2, 2.0, 0.18, 2.0], dtype=torch.float64))
    (grad_T,) = torch.autograd.grad(loss_T.sum(), values_T)
    torch.testing.assert_close(grad_T, torch.tensor([0.0, 2.0, 0.6, -2.0], dtype=torch.float64))


def test_without_a_clip_it_is_half_the_square() -> None:
    loss_T = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=None)
    assert loss_T.tolist() == [2.0]


def test_clipped_is_where_the_gradient_is_gone() -> None:
    generator = torch.Generator().manual_seed(1)
    values_T, old_T, returns_T = torch.randn((3, 200), dtype=torch.float64, generator=generator)
    values_T.requires_grad_()
    (grad_T,) = torch.autograd.grad(value_loss(values_T, old_T, returns_T, clip=0.5).sum(), values_T)
    is_clipped_T = is_value_clipped(values_T.detach(), old_T, returns_T, clip=0.5)
    assert torch.equal(is_clipped_T, grad_T == 0)
    assert 0 < is_clipped_T.sum() < 200
    assert not is_value_clipped(values_T.detach(), old_T, returns_T, clip=None).any()
