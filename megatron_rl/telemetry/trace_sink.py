"""trace.json: spans in the Chrome trace format, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_rl.telemetry.spans import Span


class TraceSink:
    """Writes each span as it ends. Both viewers accept the file of a run that crashed, which lacks the last bracket."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._file.flush()
        self._tracks: dict[str, int] = {}
        self._separator = ""

    def begin_span(self, name: str) -> None:
        """The format wants whole spans."""

    def end_span(self, span: Span) -> None:
        if span.track not in self._tracks:
            self._tracks[span.track] = len(self._tracks)
            self._write({"name": "thread_name", "ph": "M", **self._place(span), "args": {"name": span.track}})
        times = {"ts": span.start_s * 1e6, "dur": span.duration_s * 1e6}
        self._write({"name": span.name, "ph": "X", **times, **self._place(span), "args": {"step": span.step}})
        self._file.flush()

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def _place(self, span: Span) -> dict[str, int]:
        return {"pid": os.getpid(), "tid": self._tracks[span.track]}

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"
