"""How much memory a set of processes holds at most."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 3.0
"""Walking the page tables of all processes costs a tenth of a core when done every second."""


@contextmanager
def peak_memory(pids: Callable[[], Iterable[int]]) -> Iterator[list[int]]:
    """Samples the proportional memory of the processes that `pids` names; the list holds the peak in bytes."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL_S):
            peak[0] = max(peak[0], sum(_proportional_bytes(pid) for pid in pids()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
