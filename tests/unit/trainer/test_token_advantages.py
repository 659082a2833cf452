"""Advantages of a whole step, however it is cut into minibatches, microbatches and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.algorithms.advantages.whitening import identity
from megatron_rl.batching.build import build_train_batch
from megatron_rl.config.algorithm_sections import AlgorithmSection, KlSection
from megatron_rl.trainer.token_advantages import add_token_advantages
from megatron_rl.types.training import Microbatch, TrainSample

VAPO = AlgorithmSection(
    name="vapo", advantage="gae", gamma=0.9, lambda_alpha=0.6, loss="ppo", clip_low=0.2, aggregation="token-mean",
    kl=KlSection(coefficient=0.2, estimator="k1", placement="reward"),
)  # fmt: skip


def samples() -> list[TrainSample]:
    rng = np.random.default_rng(2)
    made = []
    for number, length in enumerate((7, 3, 11, 2, 5, 8)):
        made.append(
            TrainSample(
                f"{number}", "g", rng.integers(0, 9, length), (np.arange(length) > 0) & (number != 4),
                np.zeros(length, np.float32), np.zeros(length, np.int32), float(rng.normal()), 0.0, False, False,
            )
        )  # fmt: skip
    return made


def annotated(microbatch: Microbatch) -> Microbatch:
    """With arrays that depend on the sample and the position alone."""
    rows = [
        np.random.default_rng(int(index)).normal(size=(3, length))
        for index, length in zip(microbatch.sample_index_S, np.diff(microbatch.cu_seqlens), strict=True)
    ]
    arrays = np.concatenate(rows or [np.zeros((3, 0))], axis=1).astype(np.float32)
    names = ("values", "old_logprobs", "ref_logprobs")
    return replace(microbatch, token_arrays={**microbatch.token_arrays, **dict(zip(names, arrays, strict=True))})


def by_sample(num_minibatches: int, budget: int) -> tuple[dict[int, np.ndarray], dict[str, float]]:
    batch = build_train_batch(
        samples(), dp_size=1, num_minibatches=num_minibatches, max_tokens_per_microbatch=budget, seed=num_minibatches
    )
    minibatches = [[annotated(m) for m in minibatch.microbatches[0]] for minibatch in batch.minibatches]
    result, metrics = add_token_advantages(minibatches, VAPO, identity)
    assert [[m.sample_index_S.tolist() for m in part] for part in result] == [
        [m.sample_index_S.tolist() for m in part] for part in minibatches
    ]
    found = {}
    for microbatch in (m for part in result for m in part):
        pair = np.stack([microbatch.token_arrays["advantages"], microbatch.token_arrays["returns"]])
        assert pair.dtype == np.float32
        for place, index in enumerate(microbatch.sample_index_S):
            found[int(index)] = pair[:, slice(*microbatch.cu_seqlens[place : place + 2])]
    return found, metrics


def test_minibatches_and_microbatches_change_nothing() -> None:
    whole, metrics = by_sample(1, 100)
    assert sorted(whole) == [0, 1, 2, 3, 4, 5]
    advantages = np.concatenate([whole[i][0][samples()[i].loss_mask_L] for i in whole])
    assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(1, rel=1e-6)
    assert not whole[4].any()  # fully masked
    for num_minibatches, budget in ((2, 100), (3, 11), (6, 12)):
        cut, cut_metrics = by_sample(num_minibatches, budget)
        assert cut_metrics == pytest.approx(metrics)
        for index, pair in whole.items():
            np.testing.assert_allclose(cut[index], pair, rtol=1e-6, atol=1e-7)


def test_the_last_advantage_by_hand() -> None:
    """Without whitening, a last token's advantage is its reward, less its KL and value."""
    batch = build_train_batch(samples()[:1], dp_size=1, num_minibatches=1, max_tokens_per_microbatch=9, seed=1)
    microbatch = annotated(batch.minibatches[0].microbatches[0][0])
    ((result,),), _ = add_token_advantages([[microbatch]], replace(VAPO, whiten_advantages=False), identity)
    arrays = microbatch.token_arrays
    kl = arrays["old_logprobs"][-1] - arrays["ref_logprobs"][-1]
    expected = samples()[0].reward - 0.2 * kl - arrays["values"][-1]
    assert result.token_arrays["advantages"][-1] == pytest.approx(expected, rel=1e-5)
    assert result.token_arrays["returns"][-1] == pytest.approx(samples()[0].reward - 0.2 * kl, rel=1e-5)


def test_what_was_not_annotated_is_named() -> None:
    batch = build_train_batch(samples(), dp_size=1, num_minibatches=1, max_tokens_per_microbatch=100, seed=1)
    with pytest.raises(ValueError, match=r"lacks token_arrays\['values'\]"):
        add_token_advantages([batch.minibatches[0].microbatches[0]], VAPO, identity)
