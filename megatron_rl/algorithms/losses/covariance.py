"""Keeping entropy up by the covariance of advantage and log-prob: Clip-Cov and KL-Cov (arXiv 2505.22617).

cov_t = (A_t - mean A) (log pi_t - mean log pi): tokens with a large positive value are those that lower the entropy
most. The population is the unmasked tokens that are handed in; hand in the minibatch's `means` where it is split over
ranks. Shape suffix: _T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.ppo import ppo_loss
from megatron_rl.algorithms.losses.token_loss import TokenLoss


def token_covariance(
    policy_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, means: tuple[float, float] | None = None
) -> Tensor:
    """cov_t, detached, [T]. `means` = (mean advantage, mean log-prob) over the population; None: over this mask."""
    logprobs_T = policy_logprobs_T.detach()
    if means is None:
        num_tokens = mask_T.sum().clamp(min=1)
        means = (float((advantages_T * mask_T).sum() / num_tokens), float((logprobs_T * mask_T).sum() / num_tokens))
    return (advantages_T - means[0]) * (logprobs_T - means[1])


def clip_cov_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    means: tuple[float, float] | None = None,
) -> TokenLoss:
    """PPO, with max(1, fraction N) random tokens among the unclipped ones of cov_low < cov_t < cov_high taken out."""
    base = ppo_loss(log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high)
    cov_T = token_covariance(policy_logprobs_T, advantages_T, mask_T, means)
    candidates = torch.nonzero((cov_T > cov_low) & (cov_T < cov_high) & mask_T & ~base.is_clipped_T).flatten()
    num_clipped = max(1, int(fraction * int(mask_T.sum())))
    order = torch.randperm(len(candidates), generator=generator)[:num_clipped].to(candidates.device)
    is_taken_T = torch.zeros_like(mask_T)
    is_taken_T[candidates[order]] = True
    return TokenLoss(torch.where(is_taken_T, 0.0, base.loss_T), base.ratio_T, base.is_clipped_T | is_taken_T)


def kl_cov_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    fraction: float = 2e-4,
    kl_coefficient: float = 1.0,
    means: tuple[float, float] | None = None,
) -> TokenLoss:
    """-r A, plus kl_coefficient |log r| on the max(1, fraction N) tokens of largest cov_t."""
    ratio_T = torch.exp(log_ratio_T)
    cov_T = token_covariance(policy_logprobs_T, advantages_T, mask_T, means)
    num_tokens = int(mask_T.sum())
    is_penalised_T = torch.zeros_like(mask_T)
    if num_tokens:
        top = torch.where(mask_T, cov_T, -torch.inf).topk(max(1, int(fraction * num_tokens))).indices
        is_penalised_T[top] = True
    loss_T = -advantages_T * ratio_T + torch.where(is_penalised_T, kl_coefficient * log_ratio_T.abs(), 0.0)
    return TokenLoss(loss_T, ratio_T.detach(), is_penalised_T)
