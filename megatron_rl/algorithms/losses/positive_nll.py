"""The positive-example language-model loss of VAPO. Shape suffixes: _T packed tokens, _S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.segments import Segments
from megatron_rl.types.training import Denominators


def positive_nll(policy_logprobs_T: Tensor, is_correct_S: Tensor, segments: Segments, denominators: Denominators) -> Tensor:
    """-sum over correct rows of sum_t log pi / N_pos, N_pos their trained tokens in the whole minibatch. A scalar.

    VAPO (arXiv 2504.05118 eq. 10), weighted there by 0.1. NeMo divides by the microbatch's own count, which depends on
    the layout.
    """
    is_counted_T = segments.mask_T & segments.spread(is_correct_S.bool())
    return -torch.where(is_counted_T, policy_logprobs_T, 0.0).sum() / max(denominators.num_positive_tokens, 1)
