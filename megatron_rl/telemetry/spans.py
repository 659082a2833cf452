"""Spans of time and who is told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. `start_s` counts from when its `Telemetry` was made."""

    name: str
    start_s: float
    duration_s: float
    step: int | None
    track: str
    """What runs side by side is drawn on tracks of its own."""


class SpanSink(Protocol):
    """Is told of every span as it begins and, with its length, as it ends."""

    def begin_span(self, name: str) -> None: ...

    def end_span(self, span: Span) -> None: ...

    def close(self) -> None: ...
