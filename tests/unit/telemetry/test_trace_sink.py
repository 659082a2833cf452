"""trace.json is the Chrome trace format, also before it is closed."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.telemetry.spans import Span
from megatron_rl.telemetry.trace_sink import TraceSink


def test_spans_become_whole_events_on_their_tracks(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trace.json"
    sink = TraceSink(path)
    sink.end_span(Span("generate", 1.0, 0.5, 3, "loop"))
    assert len(json.loads(path.read_text() + "]")) == 2, "a crash leaves everything but the bracket"
    sink.end_span(Span("copy", 1.25, 0.125, None, "engine"))
    sink.close()
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(e["name"], e["ts"], e["dur"], names[e["tid"]], e["args"]["step"]) for e in events if e["ph"] == "X"]
    assert spans == [("generate", 1e6, 5e5, "loop", 3), ("copy", 1.25e6, 1.25e5, "engine", None)]


def test_an_empty_trace_is_valid(tmp_path: Path) -> None:
    TraceSink(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []
