"""What a model on ranks of its own says of a step's tokens, on its way to the policy's ranks, which hold other samples.

Shape suffixes: _T packed tokens, _L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.layout.coords import coords_of
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Microbatch

ScoresBySample = Mapping[int, np.ndarray]
"""One number per token [L] of a step's samples, by their position in the step's list."""


def scores_by_sample(
    microbatches: Sequence[Microbatch], name: str, layout: ParallelLayout, rank: int
) -> dict[int, np.ndarray]:
    """The token array `name` of this data-parallel position's samples; empty from all but one of its ranks."""
    coords = coords_of(layout, rank)
    if coords.tp or coords.cp or coords.pp:
        return {}
    return {
        int(index): microbatch.token_arrays[name][start:stop]
        for microbatch in microbatches
        for index, start, stop in zip(
            microbatch.sample_index_S, microbatch.cu_seqlens[:-1], microbatch.cu_seqlens[1:], strict=True
        )
    }


def with_scores(microbatch: Microbatch, name: str, scores: ScoresBySample) -> Microbatch:
    """The microbatch with the token array `name` of its samples."""
    parts = [scores[int(index)] for index in microbatch.sample_index_S]
    scores_T = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    return replace(microbatch, token_arrays={**microbatch.token_arrays, name: scores_T})
