from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.corrections import (
    correction_weights,
    effective_sample_fraction,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    self_normalise,
    staleness_mask,
    token_divergence,
)
from megatron_rl.algorithms.segments import Segments

RHO_T = torch.tensor([0.4, 3.0, 1.0, 1.1, 0.9], dtype=torch.float64)
LOG_RHO_T = RHO_T.log()
SEGMENTS = Segments(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, True, True, False, True]), 2)


def weights(kind: str, low: float | None = None, high: float | None = None) -> list[float]:
    rollout_T = torch.full((5,), -1.0, dtype=torch.float64)
    return correction_weights(
        kind, policy_logprobs_T=rollout_T - LOG_RHO_T, old_logprobs_T=rollout_T + LOG_RHO_T,
        rollout_logprobs_T=rollout_T, advantages_T=torch.tensor([-1.0, -1, -1, -1, -1]), segments=SEGMENTS,
        low=low, high=high,
    ).tolist()  # fmt: skip


def test_kinds_of_the_section() -> None:
    np.testing.assert_allclose(weights("none"), np.ones(5))
    np.testing.assert_allclose(weights("tis"), [0.4, 2.0, 1.0, 1.1, 0.9])
    np.testing.assert_allclose(weights("icepop"), [0, 3.0, 1.0, 1.1, 0.9])
    np.testing.assert_allclose(weights("sequence_tis", high=1.0), [1.0, 1.0, 0.9, 0.9, 0.9])
    np.testing.assert_allclose(weights("sequence_mask", high=1.1), [0, 0, 0.9, 0.9, 0.9])
    np.testing.assert_allclose(weights("geometric_mask", 0.9, 1.05), [0, 0, 1.0, 1.1, 0.9])
    np.testing.assert_allclose(weights("opsm", high=0.01), [0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="'mis' is not known: choose none, tis"):
        weights("mis")


def test_the_rejection_bounds_are_those_of_the_ratio_not_of_its_inverse() -> None:
    """Within [0.5, 5] a ratio of 3 stays and 0.4 goes; the inverted test would keep [0.2, 2]."""
    keep_T = rejection_mask(LOG_RHO_T, SEGMENTS, "ratio", "token", 0.5, 5.0)
    assert keep_T.tolist() == [False, True, True, True, True]


def test_rows_are_kept_or_dropped_whole() -> None:
    assert rejection_mask(LOG_RHO_T, SEGMENTS, "k3", "max", None, 0.3).tolist() == [False] * 2 + [True] * 3
    assert rejection_mask(LOG_RHO_T, SEGMENTS, "k2", "mean", None, 0.01).tolist() == [False] * 2 + [True] * 3
    assert rejection_mask(LOG_RHO_T, SEGMENTS, "ratio", "sum", 1.0, 1.3).tolist() == [True] * 2 + [False] * 3


def test_weights_are_detached() -> None:
    log_rho_T = LOG_RHO_T.clone().requires_grad_()
    for level in ("token", "sequence", "geometric"):
        assert not importance_weights(log_rho_T, SEGMENTS, level, "truncate", None, 2.0).requires_grad


def test_unbounded_and_extreme_ratios_are_finite() -> None:
    huge_T = torch.tensor([50.0, -50.0, 1e4, -1e4, 0.0], dtype=torch.float64)
    for level in ("token", "sequence", "geometric"):
        assert torch.isfinite(importance_weights(huge_T, SEGMENTS, level, "truncate", None, None)).all()


def test_self_normalised_weights_have_mean_one() -> None:
    token_T = self_normalise(RHO_T, SEGMENTS)
    assert float(token_T[SEGMENTS.mask_T].mean()) == pytest.approx(1)
    by_row_T = self_normalise(RHO_T, SEGMENTS, by_sequence=True)
    rows = [float(by_row_T[:2].mean()), float(by_row_T[[2, 4]].mean())]
    assert np.mean(rows) == pytest.approx(1)
    halves_T = self_normalise(RHO_T, SEGMENTS, lambda local: local * 2)  # a second rank with the same tokens
    np.testing.assert_allclose(halves_T, token_T)


def test_effective_sample_fraction() -> None:
    mask_T = torch.tensor([True, True, True, True, False])
    assert float(effective_sample_fraction(torch.ones(5), mask_T)) == 1
    assert float(effective_sample_fraction(torch.tensor([1.0, 0, 0, 0, 9]), mask_T)) == 0.25


def test_opsm_drops_only_rows_with_a_negative_advantage_that_drifted() -> None:
    rollout_T = torch.tensor([-1.0, -1, -1, -1, -1])
    policy_T = torch.tensor([-1.5, -1.5, -1.5, -9, -1.5])
    for advantage, kept in ((-1.0, False), (1.0, True), (0.0, True)):
        advantages_T = torch.full((5,), advantage)
        assert off_policy_sequence_mask(policy_T, rollout_T, advantages_T, SEGMENTS, 0.4).tolist() == [kept] * 5
    assert off_policy_sequence_mask(policy_T, rollout_T, -torch.ones(5), SEGMENTS, 0.6).all()


def test_divergence_gates() -> None:
    old_T, rollout_T = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.55, 0.9]).log()
    assert (token_divergence(old_T, rollout_T, "tv") <= 0.1).tolist() == [True, False]
    assert (token_divergence(old_T, rollout_T, "binary_kl") <= 0.05).tolist() == [True, False]
    forward, backward = (token_divergence(*pair, "binary_kl") for pair in ((old_T, rollout_T), (rollout_T, old_T)))
    larger_T = token_divergence(old_T, rollout_T, "max_binary_kl")
    assert torch.equal(larger_T, torch.maximum(forward, backward)) and not torch.equal(larger_T, forward)


@pytest.mark.parametrize(("kind", "bound"), [("tv_mask", 0.2), ("binary_kl_mask", 0.05)])
def test_gated_tokens_keep_their_ratio(kind: str, bound: float) -> None:
    mask_T = torch.tensor(weights(kind, high=bound), dtype=torch.float64)
    metric = "tv" if kind == "tv_mask" else "max_binary_kl"
    rollout_T = torch.full((5,), -1.0, dtype=torch.float64)
    kept_T = token_divergence(rollout_T + LOG_RHO_T, rollout_T, metric) <= bound
    assert kept_T.any() and not kept_T.all()
    torch.testing.assert_close(mask_T, RHO_T * kept_T)


def test_geometric_truncation_is_one_weight_per_row() -> None:
    first, second = np.sqrt(0.4 * 3.0), np.sqrt(1.0 * 0.9)
    np.testing.assert_allclose(weights("geometric_tis", high=1.05), [1.05] * 2 + [second] * 3)
    np.testing.assert_allclose(weights("geometric_tis"), [first] * 2 + [second] * 3)


def test_stale_tokens_are_masked_by_version() -> None:
    assert staleness_mask(torch.tensor([3, 4, 5, -1]), policy_version=5, max_age=1).tolist() == [
        False,
        True,
        True,
        False,
    ]
