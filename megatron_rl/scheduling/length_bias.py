"""Whether a schedule prefers short answers: the lengths that are trained against the lengths that were sampled.

What is dropped for its age, or because others were faster, is long more often than not. A sample dropped before its end
has no length, only a lower bound; so the distribution of sampled lengths is estimated as one of survival (Kaplan and
Meier, 1958): dropped unfinished samples count among those at risk up to where they were cut.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

WINDOW = 4096
"""Samples that are remembered: those that were trained or dropped last."""
LEAST_SAMPLES = 64
"""Of fewer nothing is said."""


@dataclass(frozen=True, slots=True)
class LengthBias:
    """`trained_over_sampled`: the mean trained length over the estimated mean sampled length; below 1, short answers are
    preferred. `distance`: the largest difference of the two distribution functions (Kolmogorov and Smirnov)."""

    trained_over_sampled: float
    distance: float


class LengthMonitor:
    """The last samples that a schedule trained or dropped. What a filter on correctness leaves out is not its doing and
    is not told here."""

    def __init__(self, window: int = WINDOW) -> None:
        self._ended: deque[tuple[int, bool, bool]] = deque(maxlen=window)

    def observe(self, num_tokens: int, is_complete: bool, is_trained: bool) -> None:
        """A sample met its fate. Not `is_complete`: it was dropped before it ended."""
        self._ended.append((num_tokens, is_complete, is_trained))

    def bias(self) -> LengthBias:
        """Of the window; none as long as it holds few samples or nothing was dropped."""
        trained = Counter(length for length, _, is_trained in self._ended if is_trained)
        num_trained = trained.total()
        if num_trained < LEAST_SAMPLES or num_trained == len(self._ended):
            return LengthBias(1.0, 0.0)
        ended = Counter(length for length, is_complete, _ in self._ended if is_complete)
        at_risk = Counter(length for length, _, _ in self._ended)
        num_at_risk = len(self._ended)
        survival, sampled_mean, distance = 1.0, 0.0, 0.0
        num_below = before = 0
        for length in sorted(at_risk):
            sampled_mean += survival * (length - before)
            before = length
            survival *= 1.0 - ended[length] / num_at_risk
            num_at_risk -= at_risk[length]
            num_below += trained[length]
            distance = max(distance, abs(num_below / num_trained - (1.0 - survival)))
        trained_mean = sum(length * count for length, count in trained.items()) / num_trained
        return LengthBias(trained_mean / sampled_mean if sampled_mean else 1.0, distance)
