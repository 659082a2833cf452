"""Group-relative advantages: one scalar per trajectory from the rewards R of its group of G. Pure numpy, fp64.

    grpo                  (R_i - mean) / (std + eps)          arXiv 2402.03300; std with ddof 1 and eps 1e-6 by default
    dr_grpo               R_i - mean                          arXiv 2503.20783
    rloo                  R_i - mean of the others = G/(G-1) (R_i - mean)    arXiv 2402.14740
    leave_one_out         (R_i - mean of the others) / (std of the others + eps)    NeMo RL's default
    reinforce_pp          R_i, whitened afterwards over all tokens of the batch     arXiv 2501.03262
    reinforce_pp_baseline R_i - mean, whitened afterwards
    opo                   R_i - mean weighted by length       arXiv 2505.23585
    pass@k                the best of the group gets its lead over the second, the others 0    arXiv 2503.19595

A group of one has no baseline: its advantage is 0 (NeMo), or with `of_one="reward"` what a baseline of 0 and a deviation
of 1 give (verl). A group whose rewards are all equal gets exactly 0, detected by max == min: the deviation of equal
floats need not be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

OfOne = Literal["zero", "reward"]


def grpo_advantages(rewards_G: np.ndarray, ddof: int = 1, epsilon: float = 1e-6, *, of_one: OfOne = "zero") -> np.ndarray:
    """(R - mean) / (std + epsilon), [G].

    verl, OpenRLHF and TRL have ddof 1, Megatron 0: the one correct of four gets 1.5 or 1.732.
    """
    rewards_G = _as_rewards(rewards_G)
    if _is_degenerate(rewards_G):
        return _without_difference(rewards_G, of_one) / (1.0 + epsilon)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=ddof) + epsilon)


def dr_grpo_advantages(rewards_G: np.ndarray, *, of_one: OfOne = "zero") -> np.ndarray:
    """R - mean, [G]: no division, so that easy and hard prompts keep their scale."""
    rewards_G = _as_rewards(rewards_G)
    if _is_degenerate(rewards_G):
        return _without_difference(rewards_G, of_one)
    return rewards_G - rewards_G.mean()


def rloo_advantages(rewards_G: np.ndarray, *, of_one: OfOne = "zero") -> np.ndarray:
    """R_i minus the mean of the other G - 1, [G]."""
    rewards_G = _as_rewards(rewards_G)
    if _is_degenerate(rewards_G):
        return _without_difference(rewards_G, of_one)
    size = len(rewards_G)
    return (rewards_G - rewards_G.mean()) * size / (size - 1)


def leave_one_out_advantages(
    rewards_G: np.ndarray, ddof: int = 1, epsilon: float = 1e-6, *, of_one: OfOne = "zero"
) -> np.ndarray:
    """R_i minus the mean of the other G - 1, over their own deviation, [G].

    Where the others do not differ (the one correct answer of a group) nothing is divided, so that no epsilon becomes
    the scale.
    """
    rewards_G = _as_rewards(rewards_G)
    advantages_G = rloo_advantages(rewards_G, of_one=of_one)
    if _is_degenerate(rewards_G):
        return advantages_G
    for i in range(len(rewards_G)):
        others = np.delete(rewards_G, i)
        if not _is_degenerate(others):
            advantages_G[i] /= others.std(ddof=ddof) + epsilon
    return advantages_G


def opo_advantages(rewards_G: np.ndarray, num_tokens_G: np.ndarray, *, of_one: OfOne = "zero") -> np.ndarray:
    """R_i minus the length-weighted mean (the variance-optimal baseline when gradients grow with length), [G]."""
    rewards_G = _as_rewards(rewards_G)
    if _is_degenerate(rewards_G) or np.sum(num_tokens_G) == 0:
        return _without_difference(rewards_G, of_one)
    return rewards_G - np.average(rewards_G, weights=np.asarray(num_tokens_G, dtype=np.float64))


def pass_at_k_advantages(rewards_G: np.ndarray, ddof: int = 1, epsilon: float = 1e-6) -> np.ndarray:
    """(max - second) / (std + epsilon) for the first best sample, 0 for the others, [G]."""
    rewards_G = _as_rewards(rewards_G)
    advantages_G = np.zeros_like(rewards_G)
    if not _is_degenerate(rewards_G):
        best = int(rewards_G.argmax())
        lead = rewards_G[best] - np.delete(rewards_G, best).max()
        advantages_G[best] = lead / (rewards_G.std(ddof=ddof) + epsilon)
    return advantages_G


def batch_scaled_advantages(rewards: Sequence[np.ndarray], ddof: int = 1, epsilon: float = 1e-6) -> list[np.ndarray]:
    """(R_i - group mean) / (std over *all* rewards + epsilon), per group (arXiv 2508.08221)."""
    everything = np.concatenate([_as_rewards(rewards_G) for rewards_G in rewards])
    if _is_degenerate(everything):
        return [np.zeros(len(rewards_G)) for rewards_G in rewards]
    return [dr_grpo_advantages(rewards_G) / (everything.std(ddof=ddof) + epsilon) for rewards_G in rewards]


def whiten_by_tokens(
    values: Sequence[np.ndarray], num_tokens: Sequence[np.ndarray], ddof: int = 1, epsilon: float = 1e-8
) -> list[np.ndarray]:
    """Whiten per-trajectory scalars over the population of *tokens* (a long row weighs more), two-pass in fp64.

    (x - mean) / sqrt(var + epsilon). `num_tokens` are the trained tokens of each trajectory. verl uses ddof 1, OpenRLHF
    and NeMo ddof 0. Fewer than two tokens, or no variance: zeros.
    """
    flat = np.concatenate([np.asarray(v, dtype=np.float64) for v in values])
    weights = np.concatenate([np.asarray(n, dtype=np.float64) for n in num_tokens])
    total = weights.sum()
    if total <= max(ddof, 0) or flat[weights > 0].max() == flat[weights > 0].min():
        return [np.zeros(len(v)) for v in values]
    mean = (flat * weights).sum() / total
    variance = ((flat - mean) ** 2 * weights).sum() / (total - ddof)
    white = (flat - mean) / np.sqrt(variance + epsilon)
    return np.split(white, np.cumsum([len(v) for v in values])[:-1])


def _as_rewards(rewards_G: np.ndarray) -> np.ndarray:
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"a group has the rewards {rewards_G.tolist()}: expected finite numbers")
    return rewards_G


def _without_difference(rewards_G: np.ndarray, of_one: OfOne) -> np.ndarray:
    """The advantages of a group that has no baseline, or whose rewards are all equal."""
    return rewards_G.copy() if of_one == "reward" and rewards_G.size == 1 else np.zeros_like(rewards_G)


def _is_degenerate(rewards_G: np.ndarray) -> bool:
    return rewards_G.size < 2 or rewards_G.max() == rewards_G.min()
