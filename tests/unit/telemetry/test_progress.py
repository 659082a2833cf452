"""The progress line: plain on a pipe, rewritten in place on a terminal."""

from __future__ import annotations

import io

import pytest

from megatron_rl.telemetry.progress import ProgressLine, format_duration
from megatron_rl.telemetry.spans import Span

SCALARS = {
    "reward/mean": 0.51249,
    "rollout/tokens_per_s": 1234.4,
    "time/generate_s": 1.26,
    "time/reward_s": 0.0,
    "time/train_s": 2.0,
    "time/sync_s": 0.14,
    "time/step_s": 4.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_keep_the_last_accuracy_and_estimate_the_rest() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, 20)
    line.record(0, {"eval/accuracy": 0.375})
    line.record(1, SCALARS)
    line.record(2, {**SCALARS, "time/step_s": 2.0})
    line.begin_span("generate")
    line.close()
    phases = "generate 1.3 reward 0.0 train 2.0 sync 0.1 s"
    assert stream.getvalue().splitlines() == [
        "step 0/20  accuracy 0.375",
        f"step 1/20  reward 0.512  accuracy 0.375  1234 tokens/s  {phases}  left 1:16",
        f"step 2/20  reward 0.512  accuracy 0.375  1234 tokens/s  {phases}  left 0:54",
    ]


def test_a_terminal_line_is_redrawn_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    line = ProgressLine(stream, 20)
    line.begin_span("generate")
    line.end_span(Span("generate", 0.0, 1.0, 1, "loop"))
    line.record(1, SCALARS)
    line.close()
    drawn = stream.getvalue().split("\r\x1b[2K")
    assert drawn == ["", "step 0/20  [generate]", "step 1/20  reward 0.512  1234 tokens/s \n"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (90061, "25:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
