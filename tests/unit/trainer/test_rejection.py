"""Rejected tokens leave the loss mask and the denominators, over all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.algorithm import Algorithm, build_algorithm
from megatron_rl.batching.build import build_microbatch
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection
from megatron_rl.trainer.objective import loss_inputs
from megatron_rl.trainer.rejection import drop_rejected
from megatron_rl.types.training import Denominators, Microbatch

# log(old/rollout) by sequence: icepop keeps ratios between 0.5 and 5, that is logs between -0.69 and 1.61
GAPS = ([0.0, 2.0, 0.1], [-3.0, 9.0], [0.2, -0.1, 0.3, -0.9])
BEFORE = Denominators(num_tokens=9, num_sequences=3, num_positive_tokens=5)
ADVANTAGE = 0.7


def microbatch_of(gaps: list[list[float]], correct: list[bool]) -> Microbatch:
    """Each sequence has a prompt token in front of the given ones."""
    gap_T = np.concatenate([[0.0, *row] for row in gaps]).astype(np.float32)
    mask_T = np.concatenate([[False] + [True] * len(row) for row in gaps])
    rollout_T = np.where(mask_T, np.linspace(-2.0, -0.5, len(gap_T)), 0.0).astype(np.float32)
    return Microbatch(
        token_ids_T=np.arange(len(gap_T)),
        cu_seqlens=np.cumsum([0, *(len(row) + 1 for row in gaps)]).astype(np.int32),
        loss_mask_T=mask_T,
        versions_T=np.where(mask_T, 4, -1).astype(np.int32),
        rewards_S=np.zeros(len(gaps), np.float32),
        is_correct_S=np.array(correct, dtype=bool),
        sample_index_S=np.arange(len(gaps), dtype=np.int32),
        token_arrays={
            "rollout_logprobs": rollout_T,
            "old_logprobs": np.where(mask_T, rollout_T + gap_T, 0).astype(np.float32),
            "advantages": np.full(len(gap_T), ADVANTAGE, np.float32),
        },
    )


def algorithm_of(aggregation: str = "token-mean", **changes: Any) -> Algorithm:
    correction = CorrectionSection("icepop", denominator="remaining")
    options = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": aggregation, "correction": correction}
    return build_algorithm(AlgorithmSection(**options | changes))


def adding(other: list[float]) -> Any:
    """The sum over this rank and one that brings `other`."""
    return lambda statistics: statistics + np.array(other)


def loss_of(algorithm: Algorithm, parts: list[Microbatch], denominators: Denominators) -> float:
    total = 0.0
    for part in parts:
        policy_T = torch.tensor(part.token_arrays["old_logprobs"])
        total += float(algorithm.loss(loss_inputs(algorithm, part, denominators, 4, policy_T)).loss)
    return total


def test_what_remains_is_counted_and_is_all_that_is_summed() -> None:
    algorithm = algorithm_of()
    parts = [microbatch_of([*GAPS[:2]], [True, False]), microbatch_of([GAPS[2]], [True])]
    kept, denominators, metrics = drop_rejected(parts, BEFORE, algorithm, 4, adding([0, 0, 0]))
    # of the first two of three tokens remain, of the second none, of the third three of four
    assert denominators == Denominators(num_tokens=5, num_sequences=2, num_positive_tokens=5)
    assert [mask.loss_mask_T.tolist() for mask in kept] == [
        [False, True, False, True, False, False, False],
        [False, True, True, True, False],
    ]
    assert metrics == {"loss/rejected_fraction": pytest.approx(4 / 9)}
    weights = np.exp([0.0, 0.1, 0.2, -0.1, 0.3])
    assert loss_of(algorithm, kept, denominators) == pytest.approx(-ADVANTAGE * weights.sum() / 5, rel=1e-6)
    original = algorithm_of(correction=CorrectionSection("icepop"))
    assert loss_of(original, parts, BEFORE) == pytest.approx(-ADVANTAGE * weights.sum() / 9, rel=1e-6)
    by_sequence = algorithm_of("seq-mean-token-mean")
    expected = -ADVANTAGE * (weights[:2].mean() + weights[2:].mean()) / 2
    assert loss_of(by_sequence, kept, denominators) == pytest.approx(expected, rel=1e-6)


def test_counts_are_of_all_ranks_and_a_rank_may_be_empty() -> None:
    part = microbatch_of([GAPS[0]], [True])
    _, denominators, metrics = drop_rejected([part], BEFORE, algorithm_of(), 4, adding([3, 1, 3]))
    assert denominators == Denominators(5, 2, 5)
    assert metrics["loss/rejected_fraction"] == pytest.approx(4 / 9)
    nothing = build_microbatch([], [])
    empty = replace(nothing, token_arrays={**nothing.token_arrays, "old_logprobs": np.zeros(0, dtype=np.float32)})
    kept, denominators, _ = drop_rejected([empty], BEFORE, algorithm_of(), 4, adding([5, 2, 5]))
    assert denominators == Denominators(5, 2, 5) and kept[0].num_tokens == 0


def test_tokens_that_are_too_old_are_rejected_too_and_a_batch_may_vanish() -> None:
    old = CorrectionSection("tis", max_version_age=1, denominator="remaining")
    part = microbatch_of([GAPS[0]], [True])
    algorithm = algorithm_of(correction=old)
    kept, denominators, _ = drop_rejected([part], BEFORE, algorithm, 5, adding([0, 0, 0]))
    assert denominators.num_tokens == 3 and kept[0].loss_mask_T.sum() == 3
    kept, denominators, metrics = drop_rejected([part], BEFORE, algorithm, 6, adding([0, 0, 0]))
    assert denominators == Denominators(0, 0, 0) and metrics["loss/rejected_fraction"] == 1
    assert loss_of(algorithm, kept, denominators) == 0


def test_a_sequence_without_a_token_counts_where_masked_sequences_do() -> None:
    algorithm = algorithm_of("seq-mean-token-sum", masked_sequences="count")
    _, denominators, _ = drop_rejected([microbatch_of([*GAPS], [True, False, True])], BEFORE, algorithm, 4, adding([0, 0, 0]))
    assert denominators == Denominators(num_tokens=5, num_sequences=3, num_positive_tokens=5)
