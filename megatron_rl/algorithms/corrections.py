"""Train-inference correction: detached weights f(rho) on the policy loss, rho_t = pi_old(t) / mu(t).

mu is the engine's probability of the token under the version that sampled it, so partial rollouts need nothing more.
Whatever is masked here keeps its place in the denominators: a rejected token lowers the gradient, it does not raise the
others' (`correction.denominator: remaining` takes it out of the loss mask beforehand). Defaults in brackets.

    tis             min(rho, high)                    [high 2]         arXiv 2110.00641 sec. 3; per token
    icepop          rho where low <= rho <= high, 0 elsewhere [0.5, 5] masked importance sampling, per token
    sequence_tis    min(prod_t rho, high)             [high 2]         unbiased, long rows saturate
    sequence_mask   prod_t rho where within bounds    [high 3]         TRL's default
    geometric_tis   exp(mean_t log rho), truncated    [high 2]         one weight per row, not length-biased
    geometric_mask  rows with exp(mean_t log rho) outside the bounds are dropped, the others keep their token rho
                                                      [0.999, 1.001]
    binary_kl_mask  rho where max(KL(mu, pi_old), KL(pi_old, mu)) <= high, of the sampled token against all others
                                                      [high 0.02]
    tv_mask         rho where |pi_old - mu| <= high   [high 0.2]
    opsm            rows with A < 0 and mean_t log(mu / pi_policy) > high are dropped, all other weights are 1
                                                      [high 1e-4]      DeepSeek-V3.2, arXiv 2512.02556 eq. 9

Shape suffixes: _T packed tokens, _S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.segments import Segments, identity

DEFAULT_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (None, 2.0),
    "sequence_mask": (None, 3.0),
    "geometric_tis": (None, 2.0),
    "geometric_mask": (0.999, 1.001),
    "binary_kl_mask": (None, 0.02),
    "tv_mask": (None, 0.2),
    "opsm": (None, 1e-4),
}


def correction_weights(
    kind: str,
    *,
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The module's table, [T], detached. A bound of None takes the kind's default."""
    log_rho_T = log_ratio(old_logprobs_T, rollout_logprobs_T).detach()
    if kind == "none":
        return torch.ones_like(log_rho_T)
    if kind not in DEFAULT_BOUNDS:
        raise ValueError(f"algorithm.correction.kind={kind!r} is not known: choose none, {', '.join(DEFAULT_BOUNDS)}")
    default_low, default_high = DEFAULT_BOUNDS[kind]
    low = default_low if low is None else low
    high = default_high if high is None else high
    if kind == "tis":
        return importance_weights(log_rho_T, segments, "token", "truncate", low, high)
    if kind == "icepop":
        return importance_weights(log_rho_T, segments, "token", "mask", low, high)
    if kind == "sequence_tis":
        return importance_weights(log_rho_T, segments, "sequence", "truncate", low, high)
    if kind == "sequence_mask":
        return importance_weights(log_rho_T, segments, "sequence", "mask", low, high)
    if kind == "geometric_tis":
        return importance_weights(log_rho_T, segments, "geometric", "truncate", low, high)
    if kind == "geometric_mask":
        keep_T = rejection_mask(log_rho_T, segments, "ratio", "mean", low, high)
        return torch.exp(log_rho_T) * keep_T
    assert high is not None
    if kind in ("binary_kl_mask", "tv_mask"):
        metric: Literal["tv", "max_binary_kl"] = "tv" if kind == "tv_mask" else "max_binary_kl"
        return torch.exp(log_rho_T) * (token_divergence(old_logprobs_T, rollout_logprobs_T, metric) <= high)
    keep_T = off_policy_sequence_mask(policy_logprobs_T, rollout_logprobs_T, advantages_T, segments, high)
    return keep_T.to(log_rho_T.dtype)


def importance_weights(
    log_rho_T: Tensor,
    segments: Segments,
    level: Literal["token", "sequence", "geometric"],
    action: Literal["truncate", "mask"],
    low: float | None,
    high: float | None,
) -> Tensor:
    """rho per token, its product over the row, or its geometric mean over the row; truncated to or masked outside
    [low, high] (None: unbounded). [T], detached."""
    log_rho_T = log_rho_T.detach()
    if level == "sequence":
        (sum_S,) = segments.sums(log_rho_T)
        log_weight_T = segments.spread(sum_S)
    elif level == "geometric":
        (mean_S,) = segments.means(log_rho_T)
        log_weight_T = segments.spread(mean_S)
    else:
        log_weight_T = log_rho_T
    weight_T = torch.exp(log_weight_T.clamp(-20.0, 20.0))
    if action == "truncate":
        weight_T = weight_T.clamp(min=low, max=high) if (low, high) != (None, None) else weight_T
    else:
        weight_T = weight_T * _within(weight_T, low, high)
    return weight_T.to(log_rho_T.dtype)


def rejection_mask(
    log_rho_T: Tensor,
    segments: Segments,
    metric: Literal["ratio", "k2", "k3"],
    over: Literal["token", "sum", "mean", "max"],
    low: float | None,
    high: float | None,
) -> Tensor:
    """True where the metric of the token, or of its whole row, lies within [low, high]. bool [T].

    `ratio` bounds rho itself (summed or averaged in log space: the product or geometric mean), the side that peers but
    one agree on. k2 = log^2 rho / 2 and k3 = rho - 1 - log rho are distances with an upper bound. `max` asks that every
    token of the row is within bounds.
    """
    log_rho_T = log_rho_T.detach().to(torch.float64)
    statistic_T = {"ratio": log_rho_T, "k2": 0.5 * log_rho_T**2, "k3": torch.exp(log_rho_T) - 1.0 - log_rho_T}[metric]
    to_value = torch.exp if metric == "ratio" else torch.clone
    if over == "token":
        return _within(to_value(statistic_T), low, high)
    if over == "max":
        (num_outside_S,) = segments.sums((~_within(to_value(statistic_T), low, high)).to(torch.float64))
        return segments.spread(num_outside_S == 0)
    (row_S,) = segments.sums(statistic_T) if over == "sum" else segments.means(statistic_T)
    return segments.spread(_within(to_value(row_S.clamp(-20.0, 20.0) if metric == "ratio" else row_S), low, high))


def token_divergence(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, metric: Literal["tv", "binary_kl", "max_binary_kl"]
) -> Tensor:
    """The sampled token's own divergence between engine and trainer, [T], detached: what gates ask.

    tv = |pi_old - mu|; binary_kl = KL of the two-outcome distribution (this token, any other), mu against pi_old;
    max_binary_kl = the larger of its two directions (KPop in verl and AReaL).
    """
    mu_T, pi_T = rollout_logprobs_T.detach(), old_logprobs_T.detach()
    if metric == "tv":
        return (torch.exp(pi_T) - torch.exp(mu_T)).abs()
    forward_T = binary_kl(mu_T, pi_T)
    return forward_T if metric == "binary_kl" else torch.maximum(forward_T, binary_kl(pi_T, mu_T))


def binary_kl(p_logprobs_T: Tensor, q_logprobs_T: Tensor) -> Tensor:
    """KL(Bernoulli(p), Bernoulli(q)) of the sampled token against all others, [T].

    Probabilities are kept 1e-6 inside (0, 1).
    """
    p_T = torch.exp(p_logprobs_T).clamp(1e-6, 1.0 - 1e-6)
    q_T = torch.exp(q_logprobs_T).clamp(1e-6, 1.0 - 1e-6)
    return p_T * (p_T / q_T).log() + (1.0 - p_T) * ((1.0 - p_T) / (1.0 - q_T)).log()


def off_policy_sequence_mask(
    policy_logprobs_T: Tensor, rollout_logprobs_T: Tensor, advantages_T: Tensor, segments: Segments, threshold: float
) -> Tensor:
    """False on rows with a negative mean advantage whose mean log(mu / pi_policy) exceeds `threshold`. bool [T]."""
    drift_S, advantage_S = segments.means(log_ratio(rollout_logprobs_T, policy_logprobs_T.detach()), advantages_T)
    return segments.spread(~((advantage_S < 0) & (drift_S > threshold)))


def self_normalise(
    weights_T: Tensor,
    segments: Segments,
    reduce_sum: Callable[[Tensor], Tensor] = identity,
    *,
    by_sequence: bool = False,
) -> Tensor:
    """Weights divided by their mean over all trained tokens (or, `by_sequence`, over the rows' own means).

    `reduce_sum` adds [sum, count] over all ranks and microbatches of the minibatch.
    """
    if by_sequence:
        (mean_S,) = segments.means(weights_T)
        has_any_S = segments.counts_S > 0
        local = torch.stack([mean_S[has_any_S].sum(), has_any_S.sum().to(mean_S.dtype)])
    else:
        local = torch.stack([(weights_T * segments.mask_T).sum(), segments.mask_T.sum().to(weights_T.dtype)])
    total, count = reduce_sum(local.detach()).unbind()
    mean = total / count.clamp(min=1.0)
    return (weights_T / torch.where(mean > 0, mean, 1.0)).to(weights_T.dtype)


def effective_sample_fraction(weights_T: Tensor, mask_T: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over trained tokens (Kish): 1 when all weights are equal."""
    weights = weights_T[mask_T]
    return weights.sum() ** 2 / ((weights**2).sum() * len(weights)).clamp(min=1e-30)


def staleness_mask(versions_T: Tensor, policy_version: int, max_age: int) -> Tensor:
    """True on tokens sampled at most `max_age` versions before `policy_version`. bool [T]."""
    return versions_T >= policy_version - max_age


def _within(value: Tensor, low: float | None, high: float | None) -> Tensor:
    inside = torch.ones_like(value, dtype=torch.bool)
    if low is not None:
        inside &= value >= low
    if high is not None:
        inside &= value <= high
    return inside
