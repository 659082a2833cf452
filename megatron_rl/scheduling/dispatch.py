"""One queue that feeds all engines: whoever has room pulls the next item; items with a prefix prefer their engine."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Order = tuple[Any, ...]
"""Lower goes first; ties go by arrival."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    item: T
    engine: int | None
    is_waiting: bool = True


class _Heap(Generic[T]):
    """A heap of entries that may be taken through another heap; what is gone is swept out as it surfaces, or when it is
    most of the heap."""

    def __init__(self) -> None:
        self._rows: list[tuple[Order, int, _Entry[T]]] = []

    def push(self, order: Order, arrival: int, entry: _Entry[T]) -> None:
        heapq.heappush(self._rows, (order, arrival, entry))

    def top(self) -> tuple[Order, int, _Entry[T]] | None:
        rows = self._rows
        while rows and not rows[0][2].is_waiting:
            heapq.heappop(rows)
        return rows[0] if rows else None

    def sweep(self, num_waiting: int) -> None:
        if len(self._rows) > 2 * num_waiting + 64:
            self._rows = [row for row in self._rows if row[2].is_waiting]
            heapq.heapify(self._rows)


class DispatchQueue(Generic[T]):
    """Items in order over several engines, at most `limits[e]` at once on engine e. No clock, no engine: events only.

    An item put with an engine waits for that one (its prefix is cached there) as long as that one has room or work is
    left for the others; an engine that would idle steals it. Every operation is O(log items), none O(engines).
    """

    def __init__(self, limits: Sequence[int]) -> None:
        if not limits or min(limits) < 1:
            raise ValueError(f"every engine needs a limit of at least 1, got {list(limits)}")
        self._limits = list(limits)
        self._running = [0] * len(limits)
        self._num_running = 0
        self._roomy: OrderedDict[int, None] = OrderedDict.fromkeys(range(len(limits)))
        self._shared: _Heap[T] = _Heap()
        self._sticky: _Heap[T] = _Heap()
        self._own: list[_Heap[T]] = [_Heap() for _ in limits]
        self._num_own = [0] * len(limits)
        self._expecting: OrderedDict[int, None] = OrderedDict()
        """Engines that have room and for which items wait."""
        self._waiting: dict[T, tuple[Order, int, _Entry[T]]] = {}
        self._arrival = 0

    @property
    def limits(self) -> Sequence[int]:
        return self._limits

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._num_running

    def num_running_on(self, engine: int) -> int:
        return self._running[engine]

    def put(self, item: T, order: Order = (), engine: int | None = None) -> None:
        """`engine`: where its prefix lies. Raises when it waits already."""
        if item in self._waiting:
            raise ValueError(f"{item!r} waits already")
        self._arrival += 1
        row = (order, self._arrival, _Entry(item, engine))
        self._waiting[item] = row
        self._file(*row)

    def remove(self, item: T) -> bool:
        """Take a waiting item out; False when it does not wait."""
        row = self._waiting.pop(item, None)
        if row is not None:
            self._take_out(row[2])
        return row is not None

    def reorder(self, order_of: Callable[[T], Order]) -> None:
        """Give every waiting item a new order (O(items))."""
        rows = [(order_of(row[2].item), row[1], row[2]) for row in self._waiting.values()]
        self._shared, self._sticky = _Heap(), _Heap()
        self._own = [_Heap() for _ in self._limits]
        self._num_own = [0] * len(self._limits)
        self._expecting.clear()
        self._waiting = {row[2].item: row for row in rows}
        for row in rows:
            self._file(*row)

    def assign(self) -> Iterator[tuple[int, T]]:
        """(engine, item) for everything that can start now: the engines with room take turns; stealing comes last."""
        while self._waiting and self._roomy:
            takes_any = self._shared.top() is not None or not self._expecting
            engine = next(iter(self._roomy if takes_any else self._expecting))
            item = self.pull(engine)
            assert item is not None, f"engine {engine} has room, and of {len(self._waiting)} waiting items it gets none"
            yield engine, item

    def pull(self, engine: int) -> T | None:
        """The next item for an engine, one that waits for another only when there is none else; None when it is full or
        nothing waits."""
        if engine not in self._roomy:
            return None
        own, shared = self._own[engine].top(), self._shared.top()
        row = min((row for row in (own, shared) if row is not None), key=lambda row: row[:2], default=None)
        if row is None:
            row = self._sticky.top()
        if row is None:
            return None
        entry = row[2]
        del self._waiting[entry.item]
        self._take_out(entry)
        self._sticky.sweep(len(self._waiting))
        if entry.engine is not None:
            self._own[entry.engine].sweep(len(self._waiting))
        self._running[engine] += 1
        self._num_running += 1
        self._note_room(engine)
        for engines in (self._roomy, self._expecting):
            if engine in engines:
                engines.move_to_end(engine)
        return entry.item

    def finish(self, engine: int) -> None:
        """An item of that engine ended, one way or another."""
        self._running[engine] -= 1
        self._num_running -= 1
        self._note_room(engine)

    def set_limit(self, engine: int, limit: int) -> None:
        """What runs above a lowered limit runs on; 0 closes the engine to new items."""
        self._limits[engine] = limit
        self._note_room(engine)

    def _file(self, order: Order, arrival: int, entry: _Entry[T]) -> None:
        if entry.engine is None:
            self._shared.push(order, arrival, entry)
        else:
            self._own[entry.engine].push(order, arrival, entry)
            self._sticky.push(order, arrival, entry)
            self._num_own[entry.engine] += 1
            self._note_room(entry.engine)

    def _take_out(self, entry: _Entry[T]) -> None:
        entry.is_waiting = False
        if entry.engine is not None:
            self._num_own[entry.engine] -= 1
            self._note_room(entry.engine)

    def _note_room(self, engine: int) -> None:
        if self._running[engine] < self._limits[engine]:
            self._roomy.setdefault(engine, None)
        else:
            self._roomy.pop(engine, None)
        if self._num_own[engine] and engine in self._roomy:
            self._expecting.setdefault(engine, None)
        else:
            self._expecting.pop(engine, None)
