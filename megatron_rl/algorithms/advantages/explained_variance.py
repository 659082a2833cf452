"""How much of the returns' variance a critic's values explain. Shape suffix: _T packed tokens."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithms.advantages.whitening import SumOverRanks, identity


def explained_variance(
    values_T: np.ndarray, returns_T: np.ndarray, mask_T: np.ndarray, reduce_sum: SumOverRanks = identity
) -> float:
    """1 - Var(R - V) / Var(R) over unmasked tokens: 1 for perfect values, 0 for a constant, below 0 for worse than that.

    0 where the returns do not vary. Two passes, two calls of `reduce_sum` on every rank, as in `whiten`.
    """
    mask_T = np.asarray(mask_T, dtype=bool)
    returns = np.asarray(returns_T, dtype=np.float64)[mask_T]
    errors = returns - np.asarray(values_T, dtype=np.float64)[mask_T]
    count, sum_of_returns, sum_of_errors = reduce_sum(np.array([float(len(returns)), returns.sum(), errors.sum()]))
    mean_return, mean_error = sum_of_returns / max(count, 1.0), sum_of_errors / max(count, 1.0)
    spread, unexplained = reduce_sum(np.array([((returns - mean_return) ** 2).sum(), ((errors - mean_error) ** 2).sum()]))
    is_constant = spread <= 1e-12 * max(count, 1.0) * mean_return**2
    return 0.0 if is_constant else float(1.0 - unexplained / spread)
