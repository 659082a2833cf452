"""The sinks that a run directory gets."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from megatron_rl.config.sections import TelemetrySection
from megatron_rl.telemetry.jsonl_sink import JsonlSink
from megatron_rl.telemetry.progress import ProgressLine
from megatron_rl.telemetry.spans import SpanSink
from megatron_rl.telemetry.telemetry import Telemetry
from megatron_rl.telemetry.trace_sink import TraceSink
from megatron_rl.types.protocols import MetricSink


def build_telemetry(section: TelemetrySection, directory: Path, num_steps: int, stream: TextIO) -> Telemetry:
    """metrics.jsonl and trace.json in `directory`, tensorboard/ if wanted, the progress line on `stream` (stderr)."""
    sinks: list[MetricSink] = [JsonlSink(directory / "metrics.jsonl")]
    span_sinks: list[SpanSink] = [TraceSink(directory / "trace.json")]
    if section.tensorboard:
        # Here, so that a run with `tensorboard: false` needs no TensorBoard.
        from megatron_rl.telemetry.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(directory / "tensorboard"))
    if section.progress != "off":
        progress = ProgressLine(stream, num_steps, section.progress)
        sinks.append(progress)
        span_sinks.append(progress)
    return Telemetry(sinks, span_sinks)
