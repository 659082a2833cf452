"""Length shaping: what a response's length costs, added to its reward (never to `is_correct`)."""

from __future__ import annotations


def soft_overlong_punishment(length: int, max_length: int, cache_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-1, 0]. Lengths in tokens.

    0 up to `max_length - cache_length`, then falling linearly to -1 at `max_length`, and -1 beyond.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length must be in 1..max_length ({max_length}), not {cache_length}")
    overlong = length - (max_length - cache_length)
    return -min(max(overlong / cache_length, 0.0), 1.0)
