"""Aggregation: per-token losses -> one number, by weights that depend only on global counts.

With m the mask, |o_i| the unmasked tokens of sequence i, and N_tok, N_seq the minibatch totals over all ranks
(sequences without an unmasked token do not count), loss = sum_t w_t l_t where w_t is

    token-mean               m / N_tok                    DAPO (arXiv 2503.14476), one denominator per minibatch
    token-sum                m
    seq-mean-token-sum       m / N_seq                    RLOO (arXiv 2402.14740)
    seq-mean-token-mean      m / (|o_i| N_seq)            GRPO (arXiv 2402.03300), GSPO (arXiv 2507.18071)
    seq-mean-token-sum-norm  m / (N_seq constant)         Dr. GRPO (arXiv 2503.20783)
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.segments import Segments
from megatron_rl.types.training import Denominators

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    mode: str,
    segments: Segments,
    denominators: Denominators,
    constant: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """w_t of the module's table, [T], detached, 0 on masked tokens.

    `constant` is required by seq-mean-token-sum-norm (usually the longest answer that can be sampled) and refused
    elsewhere. A minibatch without a trained token gives weights of 0.
    """
    if (mode == "seq-mean-token-sum-norm") != (constant is not None):
        raise ValueError(
            f"algorithm.aggregation={mode} with algorithm.aggregation_constant={constant}: the constant belongs to "
            "seq-mean-token-sum-norm (set it to rollout.sampling.max_new_tokens) and to no other mode (set it to null)"
        )
    mask_T = segments.mask_T.to(torch.float64)
    num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    if mode == "token-mean":
        weights_T = mask_T / num_tokens
    elif mode == "token-sum":
        weights_T = mask_T
    elif mode == "seq-mean-token-sum":
        weights_T = mask_T / num_sequences
    elif mode == "seq-mean-token-mean":
        weights_T = mask_T / (segments.spread(segments.counts_S).clamp(min=1.0) * num_sequences)
    elif mode == "seq-mean-token-sum-norm":
        assert constant is not None
        weights_T = mask_T / (num_sequences * constant)
    else:
        raise ValueError(f"algorithm.aggregation={mode!r} is not known: choose one of {', '.join(MODES)}")
    return weights_T.to(dtype)


def aggregate(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """sum_t w_t l_t; masked tokens stay out even where their loss is not finite. Attached to the graph at T = 0."""
    return (torch.where(weights_T != 0, loss_T, 0.0) * weights_T).sum()
