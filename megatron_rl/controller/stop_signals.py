"""SIGINT and SIGTERM as a cancellation of the run, so that its own cleanup runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(Exception):
    """A signal asked the run to stop, and it has stopped."""


@contextmanager
def cancelled_by_signals() -> Iterator[Callable[[], None]]:
    """While inside, SIGINT and SIGTERM cancel the current task; leaving by that raises Interrupted, which names the signal.

    Gives a function that arms them again, to be called after Ray has connected. A second signal changes nothing: the
    cleanup has deadlines of its own.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[str] = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal(name: str) -> None:
        signal.alarm(0)  # Ray's C++ handler, if it was first, set an alarm that aborts the process in 3 s
        if not received:
            received.append(name)
            task.cancel()

    def arm() -> None:
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number.name)

    arm()
    try:
        yield arm
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(f"{received[0]}: stopped") from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
