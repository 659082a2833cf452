"""metrics.jsonl holds whole lines whatever happened before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_rl.telemetry.jsonl_sink import JsonlSink


def test_one_line_per_step_is_on_disk_at_once_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.record(step, {"reward/mean": 0.1 * step, "policy_version": step, "bad": math.nan, "worse": -math.inf})
        lines = path.read_text().splitlines()
        assert len(lines) == step
        last = {"step": step, "reward/mean": 0.1 * step, "policy_version": step, "bad": None, "worse": None}
        assert json.loads(lines[-1]) == last
        sink.close()


@pytest.mark.parametrize("cut_bytes", [1, 70_000, 200_000])
@pytest.mark.parametrize("num_whole", [0, 1, 3])
def test_a_line_cut_by_a_crash_is_dropped(tmp_path: Path, num_whole: int, cut_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": step, "pad": "y" * 50_000}) + "\n" for step in range(num_whole))
    path.write_text(whole + '{"step": 9, "' + "x" * cut_bytes)
    sink = JsonlSink(path)
    sink.record(9, {"a": 1})
    sink.close()
    assert path.read_text() == whole + '{"step": 9, "a": 1}\n'
