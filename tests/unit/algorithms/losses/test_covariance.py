from __future__ import annotations

import numpy as np
import torch

from megatron_rl.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from megatron_rl.algorithms.losses.ppo import ppo_loss

RNG = np.random.default_rng(8)
LOG_RATIO_T = torch.from_numpy(0.1 * RNG.normal(size=60))
ADVANTAGES_T = torch.from_numpy(RNG.normal(size=60))
CHOSEN_T = torch.from_numpy(RNG.random(60) < 0.2)


def test_clip_cov_takes_the_chosen_tokens_out() -> None:
    log_ratio_T = LOG_RATIO_T.clone().requires_grad_()
    loss = clip_cov_loss(log_ratio_T, ADVANTAGES_T, CHOSEN_T, clip_low=0.5, clip_high=0.5)
    base = ppo_loss(LOG_RATIO_T, ADVANTAGES_T, clip_low=0.5, clip_high=0.5)
    np.testing.assert_array_equal(loss.loss_T.detach(), torch.where(CHOSEN_T, 0.0, base.loss_T))
    assert torch.equal(loss.is_clipped_T, CHOSEN_T | base.is_clipped_T)
    (grad_T,) = torch.autograd.grad(loss.loss_T.sum(), log_ratio_T)
    assert not grad_T[CHOSEN_T].any() and grad_T[~CHOSEN_T].all()


def test_kl_cov_penalises_the_chosen_tokens_and_clips_nothing() -> None:
    loss = kl_cov_loss(3.0 * LOG_RATIO_T, ADVANTAGES_T, CHOSEN_T, kl_coefficient=3.0)
    plain_T = -ADVANTAGES_T * (3.0 * LOG_RATIO_T).exp()
    np.testing.assert_allclose(loss.loss_T, plain_T + 9.0 * LOG_RATIO_T.abs() * CHOSEN_T)
    assert torch.equal(loss.is_clipped_T, CHOSEN_T)
