"""Importance ratios between two sets of weights, on one token or one sequence.

r_t = exp(log pi_policy - log pi_old). The log-ratio is clamped to +-20 before the exponential, so that an extreme token
gives a large finite number (and no gradient) instead of an infinity. Shape suffix: _T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.segments import Segments

MAX_LOG_RATIO = 20.0


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log p - log q, clamped to +-`MAX_LOG_RATIO`. Differentiable in both arguments inside the clamp."""
    return (numerator_T - denominator_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_T: Tensor, segments: Segments) -> Tensor:
    """mean_t log r_t of each token's sequence, detached, [T] (GSPO, arXiv 2507.18071 eq. 7)."""
    (mean_S,) = segments.means(log_ratio_T)
    return segments.spread(mean_S).to(log_ratio_T.dtype)


def with_token_gradient(value_T: Tensor, logprob_T: Tensor) -> Tensor:
    """sg[v] * pi / sg[pi]: the value of v, the gradient v * d log pi (GSPO-token, arXiv 2507.18071 eq. 13)."""
    return value_T.detach() * torch.exp(logprob_T - logprob_T.detach())
