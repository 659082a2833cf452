"""Scores travel from one cut of a step's samples to another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_rl.batching.build import build_microbatch
from megatron_rl.controller.sample_scores import scores_by_sample, with_scores
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Microbatch, TrainSample


def sample(number: int, length: int) -> TrainSample:
    return TrainSample(
        sample_id=str(number), group_id="g", token_ids_L=np.arange(length), loss_mask_L=np.arange(length) > 0,
        rollout_logprobs_L=np.zeros(length, np.float32), versions_L=np.zeros(length, np.int32), reward=0.0, advantage=0.0,
        is_correct=False, is_truncated=False,
    )  # fmt: skip


SAMPLES = [sample(number, length) for number, length in enumerate((3, 5, 2, 4))]


def valued(indices: list[int]) -> Microbatch:
    """Token t of sample i has the value i + t / 100."""
    microbatch = build_microbatch(SAMPLES, indices)
    values = [i + np.arange(len(SAMPLES[i].token_ids_L)) / 100 for i in indices]
    return replace(microbatch, token_arrays={**microbatch.token_arrays, "values": np.concatenate(values)})


def test_each_sample_takes_its_numbers_along() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    parts = [scores_by_sample(cut, "values", layout, rank) for cut, rank in (
        ([valued([2, 0])], 0), ([valued([2, 0])], 1), ([valued([3]), valued([1])], 2), ([valued([3]), valued([1])], 3),
    )]  # fmt: skip
    assert [sorted(part) for part in parts] == [[0, 2], [], [1, 3], []]
    together = {index: scores for part in parts for index, scores in part.items()}
    other = with_scores(build_microbatch(SAMPLES, [1, 2, 3]), "values", together)
    np.testing.assert_array_equal(other.token_arrays["values"], valued([1, 2, 3]).token_arrays["values"])
    assert "advantages" in other.token_arrays
    assert len(with_scores(build_microbatch(SAMPLES, []), "values", together).token_arrays["values"]) == 0
