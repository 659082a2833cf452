"""How many samples an engine should run at once, from how full its KV cache is."""

from __future__ import annotations

HIGH_WATER = 0.95
"""Above this share of the KV cache an engine is about to preempt, which computes a prefix twice."""
LOW_WATER = 0.85
DECREASE = 0.75


class AdmissionWindow:
    """Additive increase, multiplicative decrease (Chiu and Jain, 1989) of one engine's limit, by measured KV use.

    The limit starts at `start`, never leaves [1, `ceiling`], and falls at most once until the engine has come down to
    it: a decrease needs time to show.
    """

    def __init__(self, start: int, ceiling: int | None = None) -> None:
        if start < 1 or (ceiling is not None and ceiling < start):
            raise ValueError(f"an admission window needs 1 <= start <= ceiling, got start {start}, ceiling {ceiling}")
        self.limit = start
        self.ceiling = start if ceiling is None else ceiling
        self._is_settling = False

    def on_usage(self, kv_fraction: float, num_running: int, num_preempted: int = 0) -> int:
        """The limit after a report: the KV cache's full share, what runs, and what was preempted since the last one."""
        if num_running <= self.limit:
            self._is_settling = False
        if kv_fraction > HIGH_WATER or num_preempted:
            if not self._is_settling:
                self.limit = max(1, int(min(self.limit, max(num_running, 1)) * DECREASE))
                self._is_settling = True
        elif kv_fraction < LOW_WATER and num_running >= self.limit:
            self.limit = min(self.ceiling, self.limit + 1)
        return self.limit
