"""GMPO: the geometric mean of clipped token ratios. Shape suffixes: _T packed tokens, _S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.segments import Segments


def gmpo_loss(
    log_ratio_T: Tensor, advantages_T: Tensor, segments: Segments, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> TokenLoss:
    """-A_i exp(mean_t c_t), c_t = the log-ratio clipped to [-clip_low, clip_high] on the advantage's side (arXiv
    2507.20673).

    A_i is the row's mean advantage. Written per token, in the stop-gradient form exp(sg[mean c]) exp(c_t - sg[c_t]), to
    be aggregated as seq-mean-token-mean: value and gradient equal the sequence form.
    """
    (advantage_S,) = segments.means(advantages_T)
    advantage_T = segments.spread(advantage_S).to(log_ratio_T.dtype)
    sign_T = torch.sign(advantage_T)
    clipped_T = log_ratio_T.clamp(-clip_low, clip_high)
    kept_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clipped_T)
    (mean_S,) = segments.means(kept_T)
    mean_T = segments.spread(mean_S).to(log_ratio_T.dtype)
    loss_T = -advantage_T * torch.exp(mean_T) * torch.exp(kept_T - kept_T.detach())
    is_clipped_T = (sign_T * log_ratio_T.detach()) > (sign_T * clipped_T.detach())
    return TokenLoss(loss_T, torch.exp(log_ratio_T.detach()), is_clipped_T)
