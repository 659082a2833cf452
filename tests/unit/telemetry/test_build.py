"""A run directory gets the files that it promises."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from megatron_rl.config.sections import TelemetrySection
from megatron_rl.telemetry.build import build_telemetry


def files_after_a_step(section: TelemetrySection, directory: Path) -> tuple[set[str], str]:
    stream = io.StringIO()
    telemetry = build_telemetry(section, directory, num_steps=3, stream=stream)
    with telemetry.step(1), telemetry.span("train"):
        telemetry.text("samples", ["x"])
    telemetry.close()
    return {path.name for path in directory.iterdir()}, stream.getvalue()


def test_all_sinks(tmp_path: Path) -> None:
    names, shown = files_after_a_step(TelemetrySection(), tmp_path)
    assert names == {"metrics.jsonl", "trace.json", "tensorboard"}
    assert shown.startswith("step 1/3  train 0.0 s  left ")


def test_without_tensorboard_and_progress(tmp_path: Path) -> None:
    names, shown = files_after_a_step(TelemetrySection(tensorboard=False, progress="off"), tmp_path)
    assert names == {"metrics.jsonl", "trace.json"}
    assert shown == ""


def test_tensorboard_is_imported_only_by_its_sink() -> None:
    code = "import sys, megatron_rl.telemetry.build; assert 'tensorboard' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
