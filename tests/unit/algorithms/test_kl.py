from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.kl import adapt_kl_coefficient, kl_estimate
from megatron_rl.algorithms.ratios import log_ratio

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REF = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4, 0.9], dtype=torch.float64), 0)
OLD = torch.log_softmax(torch.tensor([0.5, 0.1, -0.2, 0.4], dtype=torch.float64), 0)


def expected(estimator: str, sampled_from: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Value and gradient of the estimator's expectation over a four-word vocabulary."""
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    value = kl_estimate(estimator, policy, REF, log_ratio(policy, OLD))
    total = (sampled_from.exp() * value).sum()
    (grad,) = torch.autograd.grad(total, logits)
    return float(total.detach()), grad


def reverse_kl() -> tuple[float, torch.Tensor]:
    logits = LOGITS.clone().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    total = (policy.exp() * (policy - REF)).sum()
    (grad,) = torch.autograd.grad(total, logits)
    return float(total.detach()), grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_in_value_on_policy(estimator: str) -> None:
    policy = torch.log_softmax(LOGITS, 0)
    assert expected(estimator, policy)[0] == pytest.approx(reverse_kl()[0])


def test_gradients_as_losses_on_policy() -> None:
    """k1's is zero in the mean, k2's is that of the reverse KL, k3's is that of the forward KL."""
    policy = torch.log_softmax(LOGITS, 0)
    np.testing.assert_allclose(expected("k1", policy)[1], np.zeros(4), atol=1e-15)
    for estimator in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(expected(estimator, policy)[1], reverse_kl()[1])
    logits = LOGITS.clone().requires_grad_()
    forward = (REF.exp() * (REF - torch.log_softmax(logits, 0))).sum()
    np.testing.assert_allclose(expected("k3", policy)[1], torch.autograd.grad(forward, logits)[0], atol=1e-15)


def test_unbiased_is_right_off_policy_in_value_and_gradient() -> None:
    value, grad = expected("unbiased", OLD)
    assert value == pytest.approx(reverse_kl()[0])
    np.testing.assert_allclose(grad, reverse_kl()[1])
    assert float((expected("k2", OLD)[1] - reverse_kl()[1]).abs().max()) > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased", "abs", "k1+", "k3+"])
@pytest.mark.parametrize("gap", [-50.0, 50.0])
def test_extremes_stay_finite(estimator: str, gap: float) -> None:
    policy = torch.tensor([gap], requires_grad=True)
    value = kl_estimate(estimator, policy, torch.zeros(1), log_ratio(policy, torch.zeros(1)))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(policy.grad).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="unbiased needs old log-probs"):
        kl_estimate("unbiased", LOGITS, REF)
    with pytest.raises(ValueError, match="'k4' is not known: choose one of k1"):
        kl_estimate("k4", LOGITS, REF)


def test_the_controller_moves_by_a_fifth_at_most() -> None:
    assert adapt_kl_coefficient(0.2, 60.0, target=6.0, horizon=100, num_samples=100) == pytest.approx(0.24)
    assert adapt_kl_coefficient(0.2, 0.0, target=6.0, horizon=100, num_samples=50) == pytest.approx(0.18)
    assert adapt_kl_coefficient(0.2, 6.0, target=6.0, horizon=100, num_samples=50) == 0.2
