"""DPPO: tokens are kept or dropped by a divergence between the policies, not by their ratio. _T packed tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.corrections import binary_kl
from megatron_rl.algorithms.losses.token_loss import TokenLoss


def dppo_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    clip_low: float,
    clip_high: float,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """-sg[min(r, max_ratio)] A log pi on tokens inside the trust region, 0 outside (arXiv 2602.04879).

    A token is outside when the step already moved it in the advantage's direction by more than the bound: with A > 0
    and pi_policy > pi_old by `clip_high`, or A < 0 and pi_policy < pi_old by `clip_low`, where the distance is
    |pi_policy - pi_old| (tv, usually 0.15) or the two-outcome KL(pi_old, pi_policy) (kl, usually 0.05).
    """
    policy_T, old_T = torch.exp(policy_logprobs_T.detach()), torch.exp(old_logprobs_T)
    distance_T = (policy_T - old_T).abs() if divergence == "tv" else binary_kl(old_logprobs_T, policy_logprobs_T.detach())
    rose_too_far_T = (policy_T > old_T) & (distance_T > clip_high)
    fell_too_far_T = (policy_T < old_T) & (distance_T > clip_low)
    is_outside_T = torch.where(advantages_T > 0, rose_too_far_T, fell_too_far_T)
    ratio_T = torch.exp(log_ratio_T.detach())
    weight_T = torch.where(is_outside_T, 0.0, ratio_T.clamp(max=max_ratio))
    return TokenLoss(-weight_T * advantages_T * policy_logprobs_T, ratio_T, is_outside_T)
