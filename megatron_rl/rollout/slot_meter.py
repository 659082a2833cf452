"""How much of the engines' slots was in use over a stretch of time, and how long only rewards were waited for."""

from __future__ import annotations

import time
from collections.abc import Callable


class SlotMeter:
    """Integrates what runs and what is scored over time, from the last `restart`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running = self._num_scored = self._peak = 0
        self._busy_s = 0.0
        self.reward_s = 0.0
        """Time in which nothing ran any more and a reward was on its way."""
        self._since = self._last = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._since

    def change(self, by: int, scored_by: int = 0) -> None:
        """Samples started or ended to run, or to be scored."""
        now = self._clock()
        self._busy_s += self._num_running * (now - self._last)
        if self._num_scored and not self._num_running:
            self.reward_s += now - self._last
        self._last = now
        self._num_running += by
        self._num_scored += scored_by
        self._peak = max(self._peak, self._num_running)

    def restart(self) -> None:
        self.change(0)
        self._busy_s = self.reward_s = 0.0
        self._since, self._peak = self._last, self._num_running

    def efficiency(self, num_slots: int) -> float:
        """Busy slot-time over slot-time: of `num_slots`, or of as many as were in use at once where those are fewer."""
        self.change(0)
        slot_s = min(num_slots, self._peak) * (self._last - self._since)
        return min(self._busy_s / slot_s, 1.0) if slot_s > 0 else 0.0
