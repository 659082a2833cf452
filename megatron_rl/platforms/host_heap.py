"""What the C library does with host memory that torch gives back (glibc; elsewhere these do nothing)."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let this process use freed blocks again, whatever their size, instead of mapping each large one anew.

    A decode step of a real vocabulary makes and drops blocks of 100 MB; on a virtual machine their page faults took as long
    as the product that fills them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


class HostHeap:
    """Keeps a process from growing by what the C library's heap holds back (glibc; elsewhere it does nothing).

    Packed batches differ in shape from step to step, and what one leaves between long-lived blocks does not fit the next:
    a trainer on a CPU grew by half in ten steps. Pages that are given back cost a fault each when they are used again, so
    they stay until `slack_bytes` have gathered.
    """

    def __init__(self, slack_bytes: int = 1280 * 1024 * 1024) -> None:
        self._slack_bytes = slack_bytes
        self._low_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def trim(self) -> bool:
        """Give the free pages back if the process has grown by more than the slack since the last time; whether it did."""
        if self._trim is None or _resident_bytes() <= self._low_bytes + self._slack_bytes:
            return False
        self._trim(0)
        self._low_bytes = _resident_bytes()
        return True


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
