"""PPO's clipped surrogate, with clip-higher and dual clip. Shape suffix: _T packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.token_loss import TokenLoss


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -dual_clip A.

    PPO (arXiv 1707.06347 eq. 7) with clip_low = clip_high = 0.2; clip-higher (DAPO, arXiv 2503.14476 eq. 8) 0.2 / 0.28;
    dual clip (arXiv 1912.09729 eq. 5) usually 3, off by default. The gradient is 0 exactly where A > 0 and r > 1 +
    clip_high, or A < 0 and r < 1 - clip_low (or r > dual_clip): the side of the advantage decides, not the ratio alone.
    """
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * clipped_T)
    ratio_d = ratio_T.detach()
    is_clipped_T = ((advantages_T > 0) & (ratio_d > 1.0 + clip_high)) | ((advantages_T < 0) & (ratio_d < 1.0 - clip_low))
    if dual_clip is not None:
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)
        is_clipped_T = is_clipped_T | ((advantages_T < 0) & (ratio_d > dual_clip))
    return TokenLoss(loss_T, ratio_d, is_clipped_T)


def ppo_loss(
    log_ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """The clipped surrogate on each token's own ratio."""
    return clipped_surrogate(torch.exp(log_ratio_T), advantages_T, clip_low, clip_high, dual_clip)
