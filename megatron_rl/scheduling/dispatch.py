"""One shared queue that feeds all engines: whoever is free pulls the next item."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class DispatchQueue(Generic[T]):
    """First in, first out over several engines, at most `capacities[e]` items on engine e. No clock, no engine: events only.

    Items are put in group order, so that the samples of one prompt start together and share its prefill.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"every engine needs a capacity of at least 1, got {list(capacities)}")
        self._waiting: deque[T] = deque()
        self._free = list(capacities)
        self._num_running = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    def put(self, item: T) -> None:
        self._waiting.append(item)

    def pull(self, engine: int) -> T | None:
        """The next item for an engine, or None when nothing waits or the engine is full."""
        if not self._waiting or self._free[engine] == 0:
            return None
        self._free[engine] -= 1
        self._num_running += 1
        return self._waiting.popleft()

    def finish(self, engine: int) -> None:
        """An item of that engine ended, one way or another."""
        self._free[engine] += 1
        self._num_running -= 1
