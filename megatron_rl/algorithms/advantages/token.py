"""Per-token advantages, made on the trainer ranks from rewards, values and (in the reward) the KL to the reference.

Shape suffixes: _T packed tokens of this rank, _S their sequences.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithms.advantages.gae import discounted_returns, gae, length_adaptive_lambda
from megatron_rl.algorithms.advantages.whitening import SumOverRanks, identity, whiten
from megatron_rl.config.algorithm_sections import AlgorithmSection


def token_advantages(
    section: AlgorithmSection,
    *,
    rewards_S: np.ndarray,
    mask_T: np.ndarray,
    cu_seqlens: np.ndarray,
    values_T: np.ndarray | None = None,
    kl_T: np.ndarray | None = None,
    reduce_sum: SumOverRanks = identity,
    is_whitened: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages_T, returns_T), fp64, 0 on masked tokens, for all sequences of the step that this rank holds.

    The reward of a sequence falls on its last trained token; `kl_T` (old policy against reference) costs
    `kl.coefficient` on each trained token when `kl.placement` is `reward`. Returns are taken before whitening.

        gae           lambda_actor, or 1 - 1/(alpha l) with `lambda_alpha` (VAPO); critic targets with lambda_critic
        reinforce_pp  discounted return-to-go (arXiv 2501.03262)

    `reduce_sum` adds the whitening statistics over data-parallel ranks; every rank calls, those without a sequence too.
    """
    mask_T = np.asarray(mask_T, dtype=bool)
    has_kl = section.kl.coefficient != 0 and section.kl.placement == "reward"
    if has_kl and kl_T is None:
        raise ValueError("algorithm.kl.placement=reward, but no KL to the reference was handed in")
    rewards_T = token_rewards(rewards_S, mask_T, cu_seqlens, kl_T if has_kl else None, section.kl.coefficient)
    if section.advantage == "gae":
        if values_T is None:
            raise ValueError("algorithm.advantage=gae, but no values were annotated")
        lambda_S: np.ndarray | float = section.lambda_actor
        if section.lambda_alpha is not None:
            lambda_S = length_adaptive_lambda(count_per_sequence(mask_T, cu_seqlens), section.lambda_alpha)
        advantages_T, returns_T = gae(
            rewards_T,
            values_T,
            mask_T,
            cu_seqlens,
            gamma=section.gamma,
            lambda_actor_S=lambda_S,
            lambda_critic=section.lambda_critic,
        )
    elif section.advantage == "reinforce_pp":
        advantages_T = returns_T = discounted_returns(rewards_T, mask_T, cu_seqlens, section.gamma)
    else:
        raise ValueError(f"algorithm.advantage={section.advantage} is made per group, not per token")
    if is_whitened:
        advantages_T = whiten(advantages_T, mask_T, reduce_sum, ddof=section.advantage_ddof)
    return advantages_T, returns_T


def token_rewards(
    rewards_S: np.ndarray,
    mask_T: np.ndarray,
    cu_seqlens: np.ndarray,
    kl_T: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
) -> np.ndarray:
    """-coefficient KL_t on trained tokens, plus the sequence's reward on its last one; fp64 [T].

    A sequence without a trained token has no reward.
    """
    rewards_T = np.zeros(len(mask_T))
    if kl_T is not None:
        rewards_T[mask_T] = -kl_coefficient * np.asarray(kl_T, dtype=np.float64)[mask_T]
    trained = np.flatnonzero(mask_T)
    ends_S = np.searchsorted(trained, np.asarray(cu_seqlens)[1:])  # trained tokens before the end of each sequence
    has_any_S = count_per_sequence(mask_T, cu_seqlens) > 0
    rewards_T[trained[ends_S[has_any_S] - 1]] += np.asarray(rewards_S, dtype=np.float64)[has_any_S]
    return rewards_T


def count_per_sequence(mask_T: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Trained tokens of each sequence, [S]."""
    running = np.concatenate([[0], np.cumsum(mask_T)])
    return np.diff(running[np.asarray(cu_seqlens)])
