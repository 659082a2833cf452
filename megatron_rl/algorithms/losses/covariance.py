"""Keeping entropy up by treating a few tokens apart: Clip-Cov and KL-Cov (arXiv 2505.22617). _T packed tokens.

Which tokens is decided once per minibatch, over all ranks: `algorithms.covariance_choice`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.losses.token_loss import TokenLoss


def clip_cov_loss(
    log_ratio_T: Tensor, advantages_T: Tensor, is_chosen_T: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """PPO's clipped surrogate without the chosen tokens, which keep their place in the denominator."""
    base = ppo_loss(log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(torch.where(is_chosen_T, 0.0, base.loss_T), base.ratio_T, base.is_clipped_T | is_chosen_T)


def kl_cov_loss(log_ratio_T: Tensor, advantages_T: Tensor, is_chosen_T: Tensor, *, kl_coefficient: float) -> TokenLoss:
    """-r A, plus kl_coefficient |log r| on the chosen tokens. Nothing is clipped."""
    ratio_T = torch.exp(log_ratio_T)
    loss_T = -advantages_T * ratio_T + torch.where(is_chosen_T, kl_coefficient * log_ratio_T.abs(), 0.0)
    return TokenLoss(loss_T, ratio_T.detach(), is_chosen_T)
