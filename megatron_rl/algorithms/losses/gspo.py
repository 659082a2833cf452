"""GSPO: one importance ratio per sequence. Shape suffixes: _T packed tokens, _S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses.ppo import clipped_surrogate
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.ratios import sequence_log_ratio, with_token_gradient
from megatron_rl.algorithms.segments import Segments


def gspo_token_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(s_it A_it, clip(s_it) A_it) with s_it = sg[s_i] pi_it / sg[pi_it] (arXiv 2507.18071 eq. 13-14).

    s_i = exp(mean_t log r_t) over the unmasked tokens. Value and gradient equal the sequence form (eq. 5) when the
    advantage is constant over the row, while only a detached sum crosses context-parallel ranks. Defaults of the paper:
    clip 3e-4 / 4e-4, aggregated as seq-mean-token-mean.
    """
    sequence_ratio_T = torch.exp(sequence_log_ratio(log_ratio_T, segments))
    ratio_T = with_token_gradient(sequence_ratio_T, policy_logprobs_T)
    return clipped_surrogate(ratio_T, advantages_T, clip_low, clip_high, dual_clip)


def gspo_loss(
    log_ratio_T: Tensor,
    policy_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """GSPO (arXiv 2507.18071 eq. 5): as `gspo_token_loss`, with the row's mean advantage on every token.

    So the whole row is clipped or kept together, whatever the per-token advantages are.
    """
    (mean_S,) = segments.means(advantages_T)
    row_advantages_T = segments.spread(mean_S).to(advantages_T.dtype)
    return gspo_token_loss(
        log_ratio_T, policy_logprobs_T, row_advantages_T, segments,
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
    )  # fmt: skip
