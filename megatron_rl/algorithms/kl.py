"""KL estimators between the policy and its reference, per token. Shape suffix: _T packed tokens.

With x = log pi_policy - log pi_ref on tokens sampled from the policy (http://joschu.net/blog/kl-approx.html):

    k1        x                     unbiased; right inside the reward, its gradient as a loss has mean 0
    k2        x^2 / 2               gradient x grad log pi: the exact gradient of the reverse KL, on policy
    k3        exp(-x) - 1 + x       unbiased and never negative; its gradient is that of the forward KL(ref, policy)
    unbiased  (pi_policy / pi_old) k3, gradient through the ratio too: r x grad log pi, right off policy as well
              (DeepSeek-V3.2, arXiv 2512.02556)
    abs       |x|
    k1+, k3+  the value of k1 or k3 with the gradient of k2 (straight through)
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import log_ratio

MAX_K3 = 10.0
ESTIMATORS = ("k1", "k2", "k3", "unbiased", "abs", "k1+", "k3+")


def kl_estimate(estimator: str, policy_logprobs_T: Tensor, ref_logprobs_T: Tensor, log_ratio_T: Tensor | None = None) -> Tensor:
    """The module's table, [T], differentiable in `policy_logprobs_T`. k3 is capped at `MAX_K3`.

    `log_ratio_T` = log pi_policy - log pi_old, with its gradient, is needed by `unbiased` alone (which caps nothing but
    the log-ratios, so that its gradient stays r x).
    """
    x_T = log_ratio(policy_logprobs_T, ref_logprobs_T)
    if estimator == "k1":
        return x_T
    if estimator == "k2":
        return 0.5 * x_T**2
    if estimator == "k3":
        return (torch.exp(-x_T) - 1.0 + x_T).clamp(max=MAX_K3)
    if estimator == "abs":
        return x_T.abs()
    if estimator in ("k1+", "k3+"):
        k2_T = 0.5 * x_T**2
        value_T = kl_estimate(estimator[:-1], policy_logprobs_T, ref_logprobs_T)
        return k2_T + (value_T - k2_T).detach()
    if estimator == "unbiased":
        if log_ratio_T is None:
            raise ValueError("algorithm.kl.estimator=unbiased needs old log-probs; use k2 or k3 where there are none")
        return torch.exp(log_ratio_T) * (torch.exp(-x_T) - 1.0 + x_T)
    raise ValueError(f"algorithm.kl.estimator={estimator!r} is not known: choose one of {', '.join(ESTIMATORS)}")


def adapt_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """Move the coefficient towards KL = target (arXiv 1909.08593 sec. 2.2), by at most 20 % per horizon of samples."""
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_samples / horizon)
