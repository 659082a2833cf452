"""The batch of loss-check has what a layout can get wrong, and is the same for every cut."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.controller.synthetic_batch import denominators_of, microbatches_of, synthetic_samples

PPO = AlgorithmSection(loss="ppo", clip_low=0.2, clip_high=0.28, aggregation="token-mean")
VAPO = AlgorithmSection(advantage="gae", lambda_alpha=0.4, loss="ppo", clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_it_has_every_edge(seed: int) -> None:
    samples = synthetic_samples(build_algorithm(PPO), 50, seed)
    counts = [int(item.sample.loss_mask_L.sum()) for item in samples]
    assert 0 in counts and 1 in counts and len({len(item.sample.token_ids_L) for item in samples}) == len(samples)
    assert sorted(np.unique([item.sample.group_id for item in samples], return_counts=True)[1]) == [1, 3, 4, 4]
    offsets = np.concatenate([item.arrays["old_logprobs_offset"] for item in samples])
    ratios = np.exp(-offsets)
    assert (ratios > 1.28).any() and (ratios < 0.8).any() and ((ratios < 1.28) & (ratios > 0.8)).any()


def test_every_cut_holds_the_same_tokens_and_one_denominator() -> None:
    samples = synthetic_samples(build_algorithm(PPO), 50, 1)
    whole = microbatches_of(samples, range(12), 1)[0]
    parts = microbatches_of(samples, list(range(12))[::-1], 15)
    assert sum(part.num_tokens == 0 for part in parts) == 3
    for name in ("advantages", "old_logprobs_offset"):
        merged = np.concatenate([part.token_arrays[name] for part in parts])
        np.testing.assert_array_equal(np.sort(merged), np.sort(whole.token_arrays[name]))
    counts = denominators_of(samples, PPO)
    assert counts.num_tokens == whole.loss_mask_T.sum() and counts.num_sequences == 11


def test_token_advantages_differ_inside_an_answer() -> None:
    samples = synthetic_samples(build_algorithm(VAPO), 50, 1)
    longest = max(samples, key=lambda item: len(item.sample.token_ids_L))
    trained = longest.arrays["advantages"][longest.sample.loss_mask_L]
    assert len(np.unique(trained)) == len(trained) > 10
