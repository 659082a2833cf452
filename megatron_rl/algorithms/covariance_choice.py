"""Which tokens of a minibatch Clip-Cov and KL-Cov treat apart (arXiv 2505.22617 eq. 9-11). Pure numpy.

cov_t = (A_t - mean A) (log pi_t - mean log pi): tokens with a large positive value are those that lower the entropy
most. Means, counts and the choice itself are of the whole minibatch, so that no layout changes them; peers choose per
microbatch. The log-probs are those at the start of the step, before anything is split (equal to the current policy's
at its first optimizer step). Shape suffix: _T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_rl.config.algorithm_sections import CovarianceSection

Gather = Callable[[np.ndarray], np.ndarray]
"""Rows of all data-parallel ranks under each other; called by empty ranks too, equally often on each."""


def identity(rows: np.ndarray) -> np.ndarray:
    """One rank holds everything."""
    return rows


def token_covariance(
    logprobs_T: np.ndarray, advantages_T: np.ndarray, mask_T: np.ndarray, gather: Gather = identity
) -> tuple[np.ndarray, int]:
    """(cov_t fp64 [T], trained tokens of the minibatch). Means run over the trained tokens of all ranks."""
    logprobs_T, advantages_T = np.asarray(logprobs_T, np.float64), np.asarray(advantages_T, np.float64)
    local = np.array([[advantages_T[mask_T].sum(), logprobs_T[mask_T].sum(), float(mask_T.sum())]])
    sum_advantages, sum_logprobs, count = gather(local).sum(axis=0)
    mean_of = max(count, 1.0)
    return (advantages_T - sum_advantages / mean_of) * (logprobs_T - sum_logprobs / mean_of), int(count)


def choose_tokens(
    kind: str,
    section: CovarianceSection,
    *,
    logprobs_T: np.ndarray,
    advantages_T: np.ndarray,
    mask_T: np.ndarray,
    draws_T: np.ndarray,
    is_excluded_T: np.ndarray | None = None,
    gather: Gather = identity,
) -> np.ndarray:
    """True on the max(1, fraction N) chosen tokens of the minibatch (fewer where there are no more candidates). bool [T].

        clip_cov  the smallest draws among tokens with low < cov_t < high that are not excluded (clipped anyway)
        kl_cov    the largest cov_t

    `draws_T` are uniform numbers that belong to the tokens, not to the layout; they also decide between equal values.
    """
    mask_T = np.asarray(mask_T, dtype=bool)
    cov_T, num_tokens = token_covariance(logprobs_T, advantages_T, mask_T, gather)
    if kind == "clip_cov":
        is_candidate_T = mask_T & (cov_T > section.low) & (cov_T < section.high)
        if is_excluded_T is not None:
            is_candidate_T &= ~is_excluded_T
        order_T2 = np.stack([draws_T, draws_T], axis=1)
    elif kind == "kl_cov":
        is_candidate_T = mask_T
        order_T2 = np.stack([-cov_T, draws_T], axis=1)
    else:
        raise ValueError(f"no token is chosen by covariance under algorithm.loss={kind!r}")
    num_chosen = max(1, int(section.fraction * num_tokens))
    everyone = gather(_smallest(order_T2[is_candidate_T], num_chosen))
    if len(everyone) == 0:
        return np.zeros(len(mask_T), dtype=bool)
    first, second = _smallest(everyone, num_chosen)[-1]
    is_within_T = (order_T2[:, 0] < first) | ((order_T2[:, 0] == first) & (order_T2[:, 1] <= second))
    return is_candidate_T & is_within_T


def _smallest(rows: np.ndarray, count: int) -> np.ndarray:
    """The first `count` rows in lexicographic order."""
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))[:count]]
