"""Objectives that fade instead of clipping: SAPO and VESPO. Shape suffixes: _T packed tokens, _S sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.segments import Segments


def sapo_loss(log_ratio_T: Tensor, advantages_T: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive for A > 0, else tau_negative (arXiv 2511.20347).

    With p the sigmoid, the gradient weight is 4 p (1 - p) r: 1 on policy, fading on both sides. Aggregated as
    seq-mean-token-mean.
    """
    ratio_T = torch.exp(log_ratio_T)
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative).to(ratio_T.dtype)
    loss_T = -(4.0 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1.0)) * advantages_T
    ratio_d = ratio_T.detach()
    return TokenLoss(loss_T, ratio_d, torch.zeros_like(ratio_d, dtype=torch.bool))


def vespo_phi(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """phi(W) = exp(lambda) W^k exp(-lambda W), W the row's product of ratios; fp64 [S], detached. phi(1) = 1.

    k and lambda are chosen by the sign of the row's mean advantage (0 counts as positive).
    """
    (log_weight_S,) = segments.sums(log_ratio_T)
    (advantage_S,) = segments.means(advantages_T)
    log_weight_S = log_weight_S.clamp(math.log(1e-8), 20.0)
    k_S = torch.where(advantage_S >= 0, k_positive, k_negative)
    lambda_S = torch.where(advantage_S >= 0, lambda_positive, lambda_negative)
    return torch.exp(lambda_S + k_S * log_weight_S - lambda_S * torch.exp(log_weight_S))


def vespo_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """-sg[phi(W_i)] A log pi, phi as in `vespo_phi` (arXiv 2602.10693)."""
    phi_S = vespo_phi(
        log_ratio_T,
        advantages_T,
        segments,
        k_positive=k_positive,
        lambda_positive=lambda_positive,
        k_negative=k_negative,
        lambda_negative=lambda_negative,
    )
    phi_T = segments.spread(phi_S).to(log_ratio_T.dtype)
    ratio_T = torch.exp(log_ratio_T.detach())
    return TokenLoss(-phi_T * advantages_T * policy_logprobs_T, ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool))
