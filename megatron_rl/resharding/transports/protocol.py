"""How the bytes of a weight sync travel: one small interface, one table of implementations (`transports.table`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from megatron_rl.resharding.boxes import Box
from megatron_rl.resharding.digest import Digest

Item = TypeVar("Item")
Result = TypeVar("Result")
NUM_BUFFERS = 2
"""One bucket is filled while the other is read."""


class Transport(Protocol):
    """One end of one (trainer rank, engine rank) pair, for one sync.

    Both ends submit boxes of the same sizes in the same order; their bytes form one stream. All pairs run at once, each
    on its own thread. Every failure is a ChannelError, a ValueError or an OSError of one line, never a hang: the
    channel's timeout bounds each wait.
    """

    def submit_send(self, boxes: Sequence[Box]) -> None:
        """The trainer's boxes, to be read by `run`."""
        ...

    def submit_recv(self, boxes: Sequence[Box]) -> None:
        """The engine's boxes, to be written by `run`."""
        ...

    def run(self, digest: Digest) -> None:
        """Move everything submitted. `digest` sees every byte in order: as sent, or as it then stands in the boxes."""
        ...

    def close(self) -> None:
        """Let go of what `run` holds for a next one; also after a failure."""
        ...


def overlapped(
    items: Sequence[Item], first: Callable[[int, Item], Result], second: Callable[[int, Item, Result], None]
) -> None:
    """For each item `second(number, item, first(number, item))`, while `first` works one item ahead on its own thread.

    At most `NUM_BUFFERS` items are between the two: buffer `number % NUM_BUFFERS` is free when `first` gets it.
    """
    if len(items) < NUM_BUFFERS:
        for number, item in enumerate(items):
            second(number, item, first(number, item))
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-bucket") as worker:
        ahead = worker.submit(first, 0, items[0])
        for number, item in enumerate(items):
            ready = ahead.result()
            if number + 1 < len(items):
                ahead = worker.submit(first, number + 1, items[number + 1])
            second(number, item, ready)
