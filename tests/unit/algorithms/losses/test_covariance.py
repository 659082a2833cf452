from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss, token_covariance
from megatron_rl.algorithms.losses.ppo import ppo_loss

RNG = np.random.default_rng(8)
POLICY_T = torch.from_numpy(-RNG.exponential(1.0, 60))
LOG_RATIO_T = torch.from_numpy(0.1 * RNG.normal(size=60))
ADVANTAGES_T = torch.from_numpy(RNG.normal(size=60))
MASK_T = torch.from_numpy(RNG.random(60) < 0.7)


def test_covariance_of_the_trained_tokens() -> None:
    cov_T = token_covariance(POLICY_T, ADVANTAGES_T, MASK_T)[MASK_T]
    a, p = ADVANTAGES_T[MASK_T].numpy(), POLICY_T[MASK_T].numpy()
    np.testing.assert_allclose(float(cov_T.mean()), np.cov(a, p, ddof=0)[0, 1])
    given_T = token_covariance(POLICY_T, ADVANTAGES_T, MASK_T, (0.0, 0.0))
    np.testing.assert_allclose(given_T, ADVANTAGES_T * POLICY_T)


def test_clip_cov_takes_that_many_tokens_out_of_the_band() -> None:
    log_ratio_T = LOG_RATIO_T.clone().requires_grad_()
    generator = torch.Generator().manual_seed(3)
    loss = clip_cov_loss(
        log_ratio_T, POLICY_T, ADVANTAGES_T, MASK_T,
        clip_low=0.5, clip_high=0.5, fraction=0.1, cov_low=0.1, cov_high=2.0, generator=generator,
    )  # fmt: skip
    taken_T = loss.is_clipped_T
    cov_T = token_covariance(POLICY_T, ADVANTAGES_T, MASK_T)
    assert int(taken_T.sum()) == int(0.1 * int(MASK_T.sum())) and MASK_T[taken_T].all()
    assert ((cov_T[taken_T] > 0.1) & (cov_T[taken_T] < 2.0)).all()
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), log_ratio_T)
    assert not grad_T[taken_T].any() and grad_T[~taken_T].all()


def test_kl_cov_penalises_the_largest_covariances() -> None:
    loss = kl_cov_loss(LOG_RATIO_T, POLICY_T, ADVANTAGES_T, MASK_T, fraction=0.2, kl_coefficient=3.0)
    plain_T = -ADVANTAGES_T * LOG_RATIO_T.exp()
    cov_T = token_covariance(POLICY_T, ADVANTAGES_T, MASK_T)
    chosen_T = loss.is_clipped_T
    assert int(chosen_T.sum()) == int(0.2 * int(MASK_T.sum()))
    assert cov_T[chosen_T].min() > cov_T[MASK_T & ~chosen_T].max()
    np.testing.assert_allclose(loss.loss_T, plain_T + 3.0 * LOG_RATIO_T.abs() * chosen_T)


def test_no_candidate_and_no_token_change_nothing() -> None:
    nothing = torch.zeros(60, dtype=torch.bool)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    base = ppo_loss(LOG_RATIO_T, ADVANTAGES_T, **clips)
    for mask_T, low in ((nothing, 0.1), (MASK_T, 1e9)):
        loss = clip_cov_loss(LOG_RATIO_T, POLICY_T, ADVANTAGES_T, mask_T, **clips, cov_low=low, cov_high=1e10)
        np.testing.assert_array_equal(loss.loss_T, base.loss_T)
    assert not kl_cov_loss(LOG_RATIO_T, POLICY_T, ADVANTAGES_T, nothing).is_clipped_T.any()
