"""Whitening over a population of tokens that may be spread over ranks. Shape suffix: _T packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

SumOverRanks = Callable[[np.ndarray], np.ndarray]
"""Adds a small fp64 vector over all ranks that hold a part of the population; called by empty ranks too."""


def identity(statistics: np.ndarray) -> np.ndarray:
    """One rank holds everything."""
    return statistics


def whiten(
    values_T: np.ndarray,
    mask_T: np.ndarray,
    reduce_sum: SumOverRanks = identity,
    *,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_on: Literal["variance", "std"] = "variance",
) -> np.ndarray:
    """(x - mean) / sqrt(var + epsilon) on unmasked tokens, 0 elsewhere; fp64 [T].

    Two passes (mean, then squared deviations), two calls of `reduce_sum` on every rank: the one-pass form sum x^2 - n
    mean^2 cancels. ddof 1 is verl and slime, 0 is OpenRLHF, NeMo and AReaL (whose epsilon of 1e-5 stands on the std). A
    population of `ddof` tokens or fewer gives zeros.
    """
    values = np.asarray(values_T, dtype=np.float64)[np.asarray(mask_T, dtype=bool)]
    total, count = reduce_sum(np.array([values.sum(), float(len(values))]))
    mean = total / max(count, 1.0)
    (squares,) = reduce_sum(np.array([((values - mean) ** 2).sum()]))
    white_T = np.zeros(len(values_T))
    if count <= ddof:
        return white_T
    variance = squares / (count - ddof)
    scale = np.sqrt(variance) + epsilon if epsilon_on == "std" else np.sqrt(variance + epsilon)
    if scale > 0:
        white_T[np.asarray(mask_T, dtype=bool)] = (values - mean) / scale
    return white_T
