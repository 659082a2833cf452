"""Generalised advantage estimation on packed tokens, with a lambda per sequence for the actor and one for the critic.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        R_t = V_t + A_t

(arXiv 1506.02438 eq. 16), where the returns R use the critic's lambda. t runs over the *trained* tokens of a sequence:
across a masked stretch (a tool's answer) V_{t+1} and A_{t+1} are carried from the next trained token, undiscounted, as
in verl and NeMo; OpenRLHF steps through the gap with V = 0. After the last trained token both are 0. Sums are
kept in fp64, results have the dtype of the values.

Shape suffixes: _T packed tokens, _S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

Scan = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, np.ndarray, float], tuple[np.ndarray, np.ndarray]]


def length_adaptive_lambda(num_tokens_S: np.ndarray, alpha: float) -> np.ndarray:
    """1 - 1 / (alpha l), clamped at 0, l the trained tokens (VAPO, arXiv 2504.05118 eq. 9; alpha 0.05 there)."""
    num_tokens_S = np.asarray(num_tokens_S, dtype=np.float64)
    return np.maximum(0.0, 1.0 - 1.0 / np.maximum(alpha * num_tokens_S, 1e-12))


def gae(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    mask_T: np.ndarray,
    cu_seqlens: np.ndarray,
    *,
    gamma: float = 1.0,
    lambda_actor_S: np.ndarray | float = 1.0,
    lambda_critic: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages_T, returns_T) in the dtype of the values (fp32 or fp64), 0 on masked tokens.

    `cu_seqlens` is [S+1] and starts at 0. Compiled where numba is installed (one thread, a few nanoseconds per token),
    vectorised over sequences elsewhere.
    """
    values_T = np.asarray(values_T)
    dtype = values_T.dtype if values_T.dtype in (np.float32, np.float64) else np.dtype(np.float64)
    cu_seqlens = np.ascontiguousarray(cu_seqlens, dtype=np.int64)
    lambda_S = np.ascontiguousarray(np.broadcast_to(np.asarray(lambda_actor_S, np.float64), len(cu_seqlens) - 1))
    return _scan()(
        np.ascontiguousarray(rewards_T, dtype=dtype),
        np.ascontiguousarray(values_T, dtype=dtype),
        np.ascontiguousarray(mask_T, dtype=np.bool_),
        cu_seqlens,
        float(gamma),
        lambda_S,
        float(lambda_critic),
    )


def discounted_returns(rewards_T: np.ndarray, mask_T: np.ndarray, cu_seqlens: np.ndarray, gamma: float) -> np.ndarray:
    """Return-to-go sum_k gamma^k r_{t+k} over trained tokens, [T]: GAE without a critic. No discount inside a gap."""
    return gae(rewards_T, np.zeros(len(rewards_T)), mask_T, cu_seqlens, gamma=gamma)[0]


@cache
def _scan() -> Scan:
    """The compiled scan, or the vectorised one where numba is absent. Imported on first use: numba takes a second."""
    try:
        from numba import njit
    except ImportError:
        return scan_vectorised
    return njit(scan_sequential, cache=True)


def scan_sequential(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    mask_T: np.ndarray,
    cu_seqlens: np.ndarray,
    gamma: float,
    lambda_S: np.ndarray,
    lambda_critic: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence as it is written above, sequence by sequence, backwards. Meant to be compiled."""
    advantages_T = np.empty_like(values_T)
    returns_T = np.empty_like(values_T)
    for s in range(len(cu_seqlens) - 1):
        next_value = 0.0
        actor = 0.0
        critic = 0.0
        decay_actor = gamma * lambda_S[s]
        decay_critic = gamma * lambda_critic
        for t in range(cu_seqlens[s + 1] - 1, cu_seqlens[s] - 1, -1):
            if mask_T[t]:
                value = float(values_T[t])
                delta = float(rewards_T[t]) + gamma * next_value - value
                actor = delta + decay_actor * actor
                critic = delta + decay_critic * critic
                next_value = value
                advantages_T[t] = actor
                returns_T[t] = critic + value
            else:
                advantages_T[t] = 0.0
                returns_T[t] = 0.0
    return advantages_T, returns_T


def scan_vectorised(
    rewards_T: np.ndarray,
    values_T: np.ndarray,
    mask_T: np.ndarray,
    cu_seqlens: np.ndarray,
    gamma: float,
    lambda_S: np.ndarray,
    lambda_critic: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The same, one step at a time for all sequences at once: trained tokens are right-aligned in a [steps, S] grid."""
    num_sequences = len(cu_seqlens) - 1
    ids_T = np.repeat(np.arange(num_sequences), np.diff(cu_seqlens))
    trained = np.flatnonzero(mask_T)
    counts_S = np.bincount(ids_T[trained], minlength=num_sequences)
    ends_S = np.cumsum(counts_S)
    from_end = ends_S[ids_T[trained]] - 1 - np.arange(len(trained))  # 0 is the last trained token of its sequence
    place = (from_end, ids_T[trained])
    shape = (int(counts_S.max(initial=0)), num_sequences)
    rewards, values = np.zeros(shape), np.zeros(shape)
    rewards[place], values[place] = rewards_T[trained], values_T[trained]
    actor, critic = np.zeros(shape), np.zeros(shape)
    next_value, next_actor, next_critic = np.zeros((3, num_sequences))
    for step in range(shape[0]):
        delta = rewards[step] + gamma * next_value - values[step]
        actor[step] = next_actor = delta + gamma * lambda_S * next_actor
        critic[step] = next_critic = delta + gamma * lambda_critic * next_critic
        next_value = values[step]
    advantages_T, returns_T = np.zeros_like(values_T), np.zeros_like(values_T)
    advantages_T[trained] = actor[place]
    returns_T[trained] = critic[place] + values[place]
    return advantages_T, returns_T
