from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batching.build import build_microbatch, build_train_batch, compute_denominators
from megatron_rl.types.training import Minibatch, TrainBatch, TrainSample


def make_samples(count: int, seed: int = 0, max_length: int = 40) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(2, max_length))
        num_prompt = int(rng.integers(1, length))
        mask = np.arange(length) >= num_prompt
        is_truncated = bool(rng.random() < 0.2)
        samples.append(
            TrainSample(
                sample_id=f"s{index}",
                group_id=f"g{index // 4}",
                token_ids_L=rng.integers(0, 1000, length),
                loss_mask_L=mask & (not is_truncated),
                rollout_logprobs_L=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
                versions_L=np.where(mask, 3, -1).astype(np.int32),
                reward=float(rng.random()),
                advantage=float(rng.normal()),
                is_correct=bool(rng.random() < 0.5),
                is_truncated=is_truncated,
            )
        )
    return samples


def indices_of(minibatch: Minibatch) -> list[int]:
    return [int(i) for rank in minibatch.microbatches for micro in rank for i in micro.sample_index_S]


def build(samples: list[TrainSample], **changes: int) -> TrainBatch:
    options = {"dp_size": 2, "num_minibatches": 3, "max_tokens_per_microbatch": 64, "seed": 5}
    return build_train_batch(samples, **{**options, **changes})


@pytest.mark.parametrize("count", [3, 7, 24, 41])
@pytest.mark.parametrize("dp_size", [1, 2, 5])
@pytest.mark.parametrize("multiple", [1, 3])
def test_every_sample_once_per_epoch_on_equal_counts_of_microbatches(count: int, dp_size: int, multiple: int) -> None:
    samples = make_samples(count)
    batch = build(samples, dp_size=dp_size, inner_epochs=2, microbatch_multiple=multiple)
    assert batch.num_samples == count and len(batch.minibatches) == 6
    for epoch in (batch.minibatches[:3], batch.minibatches[3:]):
        assert sorted(i for minibatch in epoch for i in indices_of(minibatch)) == list(range(count))
        sizes = [len(indices_of(minibatch)) for minibatch in epoch]
        assert max(sizes) - min(sizes) <= 1
    for minibatch in batch.minibatches:
        lengths = {len(rank) for rank in minibatch.microbatches}
        assert len(minibatch.microbatches) == dp_size and len(lengths) == 1
        assert lengths.pop() % multiple == 0
        assert all(micro.num_tokens <= 64 for rank in minibatch.microbatches for micro in rank)


def test_denominators_are_global_and_skip_masked_samples() -> None:
    samples = make_samples(24)
    for minibatch in build(samples, dp_size=3).minibatches:
        micros = [micro for rank in minibatch.microbatches for micro in rank]
        counts = [
            (int(part.sum()), bool(correct))
            for micro in micros
            for part, correct in zip(np.split(micro.loss_mask_T, micro.cu_seqlens[1:-1]), micro.is_correct_S)
            if micro.num_sequences
        ]
        assert minibatch.denominators.num_tokens == sum(n for n, _ in counts)
        assert minibatch.denominators.num_sequences == sum(n > 0 for n, _ in counts)
        assert minibatch.denominators.num_positive_tokens == sum(n for n, correct in counts if correct)
    masked = [replace(sample, loss_mask_L=np.zeros_like(sample.loss_mask_L)) for sample in samples]
    assert compute_denominators(masked).num_sequences == 0 == compute_denominators(masked).num_tokens


def test_packed_arrays_are_the_samples_one_after_another() -> None:
    samples = make_samples(6)
    micro = build_microbatch(samples, [4, 1])
    first, second = samples[4], samples[1]
    border = len(first.token_ids_L)
    assert micro.cu_seqlens.tolist() == [0, border, border + len(second.token_ids_L)]
    np.testing.assert_array_equal(micro.token_ids_T[border:], second.token_ids_L)
    np.testing.assert_array_equal(micro.loss_mask_T[:border], first.loss_mask_L)
    np.testing.assert_array_equal(micro.versions_T[border:], second.versions_L)
    np.testing.assert_array_equal(micro.token_arrays["rollout_logprobs"][:border], first.rollout_logprobs_L)
    assert np.all(micro.token_arrays["advantages"][border:] == np.float32(second.advantage))
    assert micro.sample_index_S.tolist() == [4, 1]
    assert micro.rewards_S.tolist() == [np.float32(first.reward), np.float32(second.reward)]


def test_experts_are_packed_like_tokens_and_unknown_where_a_sample_has_none() -> None:
    first, second, third = make_samples(3)
    routed = [
        replace(sample, experts_LYK=np.full((len(sample.token_ids_L), 2, 1), number, dtype=np.uint8))
        for number, sample in enumerate((first, second))
    ]
    micro = build_microbatch([*routed, third], [1, 2, 0])
    lengths = [len(sample.token_ids_L) for sample in (second, third, first)]
    assert micro.experts_TYK is not None and micro.experts_TYK.shape == (sum(lengths), 2, 1)
    assert micro.experts_TYK[:, 1, 0].tolist() == np.repeat([1, 255, 0], lengths).tolist()
    assert build_microbatch([first], [0]).experts_TYK is None and build_microbatch(routed, []).experts_TYK is None


def test_an_empty_microbatch_has_empty_arrays_of_the_right_types() -> None:
    empty = build_microbatch(make_samples(2), [])
    assert (empty.num_sequences, empty.num_tokens) == (0, 0)
    full = build_microbatch(make_samples(2), [0, 1])
    for name in (
        "token_ids_T",
        "cu_seqlens",
        "loss_mask_T",
        "versions_T",
        "rewards_S",
        "is_correct_S",
        "sample_index_S",
    ):
        assert getattr(empty, name).dtype == getattr(full, name).dtype
    assert {n: a.dtype for n, a in empty.token_arrays.items()} == {n: a.dtype for n, a in full.token_arrays.items()}


def test_the_same_seed_gives_the_same_batch_and_another_another() -> None:
    samples = make_samples(24)
    order = [indices_of(m) for m in build(samples).minibatches]
    assert order == [indices_of(m) for m in build(samples).minibatches]
    assert order != [indices_of(m) for m in build(samples, seed=6).minibatches]


def test_length_multiple_counts_in_the_budget() -> None:
    samples = [replace(s, **{}) for s in make_samples(12, max_length=30)]
    batch = build(samples, length_multiple=16, num_minibatches=1)
    for rank in batch.minibatches[0].microbatches:
        for micro in rank:
            assert sum(-(-length // 16) * 16 for length in np.diff(micro.cu_seqlens)) <= 64


def test_too_long_and_too_few_are_refused_by_name() -> None:
    samples = make_samples(4, max_length=30)
    length = max(len(s.token_ids_L) for s in samples)
    name = next(s.sample_id for s in samples if len(s.token_ids_L) == length)
    with pytest.raises(
        ValueError, match=rf"sample {name} takes {length} tokens .*max_tokens_per_microbatch={length - 1}"
    ):
        build(samples, max_tokens_per_microbatch=length - 1)
    with pytest.raises(ValueError, match=r"4 samples cannot be split into trainer\.minibatches_per_step=5"):
        build(samples, num_minibatches=5)
