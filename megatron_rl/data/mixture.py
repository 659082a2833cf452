"""Shares of a weighted mixture, without chance."""

from __future__ import annotations

from collections.abc import Sequence


def choose_source(weights: Sequence[float], counts: Sequence[int]) -> int:
    """Which source gives the next prompt, when `counts` were drawn so far: the one furthest behind its share.

    After n draws every count is within 1 of n * weight / sum(weights) for two sources (and stays bounded for more), in
    any window, so each batch is a faithful mixture. Ties go to the first.
    """
    total = sum(weights)
    num_next = sum(counts) + 1
    deficits = [num_next * weight / total - count for weight, count in zip(weights, counts, strict=True)]
    return max(range(len(deficits)), key=deficits.__getitem__)


def apportion(num_items: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num_items` split by weight into whole numbers that sum to it."""
    counts = [0] * len(weights)
    for _ in range(num_items):
        counts[choose_source(weights, counts)] += 1
    return tuple(counts)
