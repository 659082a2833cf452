"""metrics.jsonl: one object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class JsonlSink:
    """Appends `{"step": ..., name: value, ...}` and a newline in one write, so that a crash leaves whole lines.

    A last line that an earlier crash cut short is dropped on opening. JSON has no NaN or infinity: they become null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _drop_cut_line(self._descriptor)

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        remaining = memoryview(line.encode())
        while remaining:
            remaining = remaining[os.write(self._descriptor, remaining) :]

    def text(self, step: int, name: str, lines: Sequence[str]) -> None:
        """Texts have no place in a file of numbers."""

    def close(self) -> None:
        os.close(self._descriptor)


def _drop_cut_line(descriptor: int, block_bytes: int = 1 << 16) -> None:
    end = os.fstat(descriptor).st_size
    position, keep = end, 0
    while position > 0:
        start = max(0, position - block_bytes)
        newline = os.pread(descriptor, position - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        position = start
    if keep < end:
        os.ftruncate(descriptor, keep)
