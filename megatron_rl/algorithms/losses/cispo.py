"""Objectives that weight log pi by a detached, capped ratio: CISPO, AIPO and plain REINFORCE. _T packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.ratios import log_ratio


def cispo_loss(
    log_ratio_T: Tensor, policy_logprobs_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi (MiniMax-M1, arXiv 2506.13585 eq. 4-5).

    Every token keeps a gradient; the loss value itself means nothing. The paper has no lower bound: clip_low = 1 says
    so. The cap is 1 + clip_high (as in verl, slime, NeMo); TRL's `epsilon_high` is the cap itself.
    """
    ratio_T = torch.exp(log_ratio_T.detach())
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight_T * advantages_T * policy_logprobs_T, ratio_T, weight_T != ratio_T)


def aipo_loss(policy_logprobs_T: Tensor, rollout_logprobs_T: Tensor, advantages_T: Tensor, *, clip_high: float) -> TokenLoss:
    """-sg[min(pi_policy / mu, 1 + clip_high)] A log pi (LlamaRL, arXiv 2505.24034): one-sided, on the engine's mu.

    Already corrects for the engine, so no further correction may multiply it. The paper's cap is 2 to 10.
    """
    ratio_T = torch.exp(log_ratio(policy_logprobs_T.detach(), rollout_logprobs_T))
    weight_T = ratio_T.clamp(max=1.0 + clip_high)
    return TokenLoss(-weight_T * advantages_T * policy_logprobs_T, ratio_T, weight_T != ratio_T)


def reinforce_loss(policy_logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """-A log pi (Williams 1992)."""
    ones_T = torch.ones_like(policy_logprobs_T.detach())
    return TokenLoss(-advantages_T * policy_logprobs_T, ones_T, torch.zeros_like(ones_T, dtype=torch.bool))
