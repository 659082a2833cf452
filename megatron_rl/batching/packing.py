"""Packing: samples into microbatches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def pack_first_fit_decreasing(lengths_S: np.ndarray, budget: int) -> list[list[int]]:
    """Positions per bin, each bin's lengths summing to at most `budget`. First-fit-decreasing, deterministic."""
    lengths_S = np.asarray(lengths_S, dtype=np.int64)
    _check_budget(lengths_S, budget)
    bins: list[list[int]] = []
    room = np.full(len(lengths_S), budget, dtype=np.int64)
    for index in np.argsort(-lengths_S, kind="stable").tolist():
        length = lengths_S[index]
        target = int(np.argmax(room[: len(bins) + 1] >= length))  # a bin not yet opened has the whole budget
        if target == len(bins):
            bins.append([])
        bins[target].append(index)
        room[target] -= length
    return bins


def pack_into(lengths_S: np.ndarray, costs_S: np.ndarray, budget: int, num_bins: int) -> list[list[int]]:
    """Exactly `num_bins` bins of even cost; bins stay empty only where there is nothing to put.

    Longest-first onto the cheapest bin with room. Where that fails (tight budgets), first-fit-decreasing, which may
    leave bins empty. `num_bins` must be at least what first-fit-decreasing needs.
    """
    lengths_S = np.asarray(lengths_S, dtype=np.int64)
    _check_budget(lengths_S, budget)
    loads = np.zeros(num_bins)
    room = np.full(num_bins, budget, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for index in np.argsort(-lengths_S, kind="stable").tolist():
        fits = room >= lengths_S[index]
        if not fits.any():
            return _pad_with_empty(pack_first_fit_decreasing(lengths_S, budget), num_bins)
        target = int(np.argmin(np.where(fits, loads, np.inf)))
        bins[target].append(index)
        loads[target] += costs_S[index]
        room[target] -= lengths_S[index]
    return bins


def compute_lower_bound(lengths_S: np.ndarray, budget: int) -> int:
    """No packing needs fewer bins: the total over the budget, or the number of samples longer than half of it."""
    lengths_S = np.asarray(lengths_S, dtype=np.int64)
    return max(-(-int(lengths_S.sum()) // budget), int((2 * lengths_S > budget).sum()))


def _pad_with_empty(bins: Sequence[list[int]], num_bins: int) -> list[list[int]]:
    if len(bins) > num_bins:
        raise ValueError(f"{len(bins)} bins are needed, {num_bins} were asked for")
    return [*bins, *([] for _ in range(num_bins - len(bins)))]


def _check_budget(lengths_S: np.ndarray, budget: int) -> None:
    if len(lengths_S) and lengths_S.max() > budget:
        position = int(lengths_S.argmax())
        raise ValueError(f"item {position} has length {lengths_S[position]}, more than the budget of {budget}")
