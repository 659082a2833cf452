"""Choosing the tokens that Clip-Cov and KL-Cov treat apart, over all data-parallel ranks of a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithms.covariance_choice import choose_tokens
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.training import Microbatch


def annotate_choice(microbatches: Sequence[Microbatch], section: AlgorithmSection, seed: int) -> list[Microbatch]:
    """The microbatches of this rank's minibatch with `chosen` (0 or 1) in their token_arrays.

    Reads `old_logprobs` and `advantages`. Collective over the data-parallel group. Random numbers belong to the sample
    and `seed`, so that the choice does not depend on the layout.
    """
    lengths = [microbatch.num_tokens for microbatch in microbatches]
    chosen_T = choose_tokens(
        section.loss,
        section.covariance,
        logprobs_T=_join([m.token_arrays["old_logprobs"] for m in microbatches]),
        advantages_T=_join([m.token_arrays["advantages"] for m in microbatches]),
        mask_T=_join([m.loss_mask_T for m in microbatches]).astype(bool),
        draws_T=_join([_draws(m, seed) for m in microbatches]),
        gather=_gather_rows,
    )
    parts = np.split(chosen_T.astype(np.float32), np.cumsum(lengths)[:-1])
    return [
        replace(microbatch, token_arrays={**microbatch.token_arrays, "chosen": part})
        for microbatch, part in zip(microbatches, parts, strict=True)
    ]


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _draws(microbatch: Microbatch, seed: int) -> np.ndarray:
    """Uniform numbers of the microbatch's tokens, sample by sample."""
    lengths = np.diff(microbatch.cu_seqlens)
    rows = [
        np.random.default_rng([seed, int(index)]).random(int(length))
        for index, length in zip(microbatch.sample_index_S, lengths, strict=True)
    ]
    return _join(rows)


def _gather_rows(rows: np.ndarray) -> np.ndarray:
    group = parallel_state.get_data_parallel_group()
    parts: list[np.ndarray] = [rows] * dist.get_world_size(group)
    dist.all_gather_object(parts, rows, group=group)
    return np.concatenate(parts)
