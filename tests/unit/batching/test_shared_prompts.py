from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching.build import build_microbatch, build_train_batch
from megatron_rl.batching.shared_prompts import share_units, shared_lengths
from megatron_rl.types.training import Microbatch, TrainSample

BUDGET = 90


def make_groups(sizes: list[tuple[int, list[int]]]) -> list[TrainSample]:
    """Per (prompt length, answer lengths) one group of samples."""
    rng = np.random.default_rng(len(sizes))
    samples = []
    for number, (num_prompt, answers) in enumerate(sizes):
        prompt = rng.integers(1, 1000, num_prompt)
        for position, num_answer in enumerate(answers):
            length = num_prompt + num_answer
            samples.append(
                TrainSample(
                    sample_id=f"g{number}/{position}",
                    group_id=f"g{number}",
                    token_ids_L=np.concatenate((prompt, rng.integers(1, 1000, num_answer))),
                    loss_mask_L=np.arange(length) >= num_prompt,
                    rollout_logprobs_L=np.zeros(length, dtype=np.float32),
                    versions_L=np.zeros(length, dtype=np.int32),
                    reward=float(position),
                    advantage=float(rng.normal()),
                    is_correct=False,
                    is_truncated=False,
                    num_prompt_tokens=num_prompt,
                )
            )
    return samples


GROUPS = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 50), min_size=1, max_size=6)), min_size=1, max_size=7)


def num_computed(microbatch: Microbatch) -> int:
    return microbatch.num_tokens - int(microbatch.shared_prefix_S.sum())


@settings(max_examples=80, deadline=None)
@given(GROUPS, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 12]))
def test_every_sample_once_and_prompts_once_per_microbatch(
    sizes: list[tuple[int, list[int]]], dp_size: int, num_minibatches: int, least: int
) -> None:
    samples = make_groups(sizes)
    num_minibatches = min(num_minibatches, len(samples))
    batch = build_train_batch(
        samples, dp_size=dp_size, num_minibatches=num_minibatches, inner_epochs=2, max_tokens_per_microbatch=BUDGET,
        seed=3, min_shared_prompt=least,
    )  # fmt: skip
    for epoch in (batch.minibatches[:num_minibatches], batch.minibatches[num_minibatches:]):
        micros = [micro for minibatch in epoch for rank in minibatch.microbatches for micro in rank]
        assert sorted(i for micro in micros for i in micro.sample_index_S) == list(range(len(samples)))
        cut = 0
        for group in {s.group_id for s in samples if s.num_prompt_tokens >= least}:
            here = [
                any(samples[i].group_id == group for rank in m.microbatches for micro in rank for i in micro.sample_index_S)
                for m in epoch
            ]
            cut += sum(here) - 1
        assert cut <= num_minibatches - 1
    for minibatch in batch.minibatches:
        assert len({len(rank) for rank in minibatch.microbatches}) == 1
        for micro in (micro for rank in minibatch.microbatches for micro in rank):
            assert num_computed(micro) <= BUDGET
            check_prefixes(micro, samples, least)


def check_prefixes(micro: Microbatch, samples: list[TrainSample], least: int) -> None:
    """Each prompt that is long enough is computed once; what is said to be shared is equal."""
    computed: set[str] = set()
    sequences = [micro.token_ids_T[a:b] for a, b in pairwise(micro.cu_seqlens.tolist())]
    for number, index in enumerate(micro.sample_index_S):
        sample, shared = samples[index], micro.shared_prefix_S[number]
        is_again = sample.group_id in computed and sample.num_prompt_tokens >= least
        assert shared == (sample.num_prompt_tokens if is_again else 0)
        np.testing.assert_array_equal(sequences[number], sample.token_ids_L)
        if shared:
            np.testing.assert_array_equal(sequences[number][:shared], sequences[number - 1][:shared])
        computed.add(sample.group_id)


def test_the_cost_of_a_group_counts_the_prompt_once_and_its_attention_fully() -> None:
    samples = make_groups([(100, [20, 40])])
    lengths_S = np.array([120, 140])
    units, _ = share_units(samples, lengths_S, shared_lengths(samples, 1), num_ranks=1, budget=1000, attention_crossover=50.0)
    assert units.lengths_U.tolist() == [160]
    # Per row 1 for dense work and, for a row at position p, 2 p / 50 for attention (the mean over n rows is n / 50).
    prompt = 100 + 100**2 / 50
    answers = sum(n + (n**2 + 2 * n * 100) / 50 for n in (20, 40))
    assert units.costs_U.tolist() == pytest.approx([prompt + answers])


def test_groups_stay_whole_where_that_balances_and_are_cut_where_it_does_not() -> None:
    samples = make_groups([(20, [10] * 6)] * 4)
    batch = build_train_batch(samples, dp_size=2, num_minibatches=1, max_tokens_per_microbatch=200, seed=1, min_shared_prompt=1)
    for rank in batch.minibatches[0].microbatches:
        assert sum(num_computed(micro) for micro in rank) == 2 * (20 + 60)
    lone = build_train_batch(
        samples[:6], dp_size=3, num_minibatches=1, max_tokens_per_microbatch=200, seed=1, min_shared_prompt=1
    )
    sizes = [sum(num_computed(micro) for micro in rank) for rank in lone.minibatches[0].microbatches]
    assert max(sizes) <= 40 and sum(sizes) == 3 * (20 + 20)


def test_without_a_minimum_nothing_is_shared() -> None:
    samples = make_groups([(20, [10, 10])])
    assert build_microbatch(samples, [0, 1]).shared_prefix_S.tolist() == [0, 0]
    assert build_microbatch(samples, [0, 1], 21).shared_prefix_S.tolist() == [0, 0]
    assert build_microbatch(samples, [0, 1], 20).shared_prefix_S.tolist() == [0, 20]
