"""Taking rejected tokens out of a minibatch before its loss, so that denominators count what remains.

Shape suffix: _T packed tokens (token-aligned).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_rl.algorithms.advantages.whitening import SumOverRanks
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.trainer.objective import loss_inputs
from megatron_rl.types.training import Denominators, Microbatch


def drop_rejected(
    microbatches: Sequence[Microbatch],
    denominators: Denominators,
    algorithm: Algorithm,
    policy_version: int | None,
    reduce_sum: SumOverRanks,
) -> tuple[list[Microbatch], Denominators, dict[str, float]]:
    """This rank's part of a minibatch without the tokens that the correction rejects, the counts of what remains on all
    ranks, and what share of the tokens was rejected. `reduce_sum` adds over data-parallel ranks; every rank calls.

    A sequence of which nothing remains counts as one that is masked as a whole (`algorithm.masked_sequences`).
    """
    remaining = []
    for microbatch in microbatches:
        old_T = torch.tensor(microbatch.token_arrays["old_logprobs"])
        mask_T = algorithm.remaining(loss_inputs(algorithm, microbatch, denominators, policy_version, old_T)).numpy()
        remaining.append(replace(microbatch, loss_mask_T=mask_T))
    local = np.sum([_counts(microbatch) for microbatch in remaining], axis=0)
    num_tokens, num_sequences, num_positive = (int(total) for total in reduce_sum(local))
    if algorithm.section.masked_sequences == "count":
        num_sequences = denominators.num_sequences
    rejected = 1 - num_tokens / max(denominators.num_tokens, 1)
    return remaining, Denominators(num_tokens, num_sequences, num_positive), {"loss/rejected_fraction": rejected}


def _counts(microbatch: Microbatch) -> np.ndarray:
    """[trained tokens, sequences that have some, trained tokens of correct sequences], fp64."""
    before_T = np.concatenate(([0], np.cumsum(microbatch.loss_mask_T)))
    counts_S = np.diff(before_T[microbatch.cu_seqlens])
    return np.array([counts_S.sum(), (counts_S > 0).sum(), counts_S[microbatch.is_correct_S].sum()], dtype=np.float64)
