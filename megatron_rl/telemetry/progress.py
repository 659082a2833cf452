"""The line that a person watches: step, reward, accuracy, tokens/s, phase times, time left."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from megatron_rl.telemetry.spans import Span

PHASES = ("generate", "reward", "train", "drain", "sync")
_CLEAR_LINE = "\r\x1b[2K"


class ProgressLine:
    """A line that is rewritten in place (`live`), or one line per step (`plain`); `auto` is live on a terminal.

    `num_steps` is the last step's number.
    """

    def __init__(self, stream: TextIO, num_steps: int, mode: Literal["auto", "live", "plain"] = "auto") -> None:
        self._stream, self._num_steps = stream, num_steps
        self._is_live = stream.isatty() if mode == "auto" else mode == "live"
        self._accuracy: float | None = None
        self._recent_step_s: deque[float] = deque(maxlen=10)
        self._line = f"step 0/{num_steps}"

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        self._accuracy = scalars.get("eval/accuracy", self._accuracy)
        if "time/step_s" in scalars:
            self._recent_step_s.append(scalars["time/step_s"])
        self._line = format_progress(step, self._num_steps, scalars, self._accuracy, self._seconds_left(step))
        if self._is_live:
            self._draw("")
        else:
            self._stream.write(self._line + "\n")
        self._stream.flush()

    def text(self, step: int, name: str, lines: Sequence[str]) -> None:
        """Samples are read in TensorBoard and in the run directory, not here."""

    def begin_span(self, name: str) -> None:
        if self._is_live:
            self._draw(name)
            self._stream.flush()

    def end_span(self, span: Span) -> None:
        """The next span or the end of the step redraws the line."""

    def close(self) -> None:
        if self._is_live:
            self._stream.write("\n")
            self._stream.flush()

    def _seconds_left(self, step: int) -> float | None:
        if not self._recent_step_s:
            return None
        return max(0, self._num_steps - step) * sum(self._recent_step_s) / len(self._recent_step_s)

    def _draw(self, running: str) -> None:
        line = f"{self._line}  [{running}]" if running else self._line
        width = shutil.get_terminal_size().columns
        self._stream.write(_CLEAR_LINE + line[: max(1, width - 1)])


def format_progress(
    step: int, num_steps: int, scalars: Mapping[str, float], accuracy: float | None, seconds_left: float | None
) -> str:
    """The line of one step; what was not measured is left out."""
    parts = [f"step {step}/{num_steps}"]
    if "reward/mean" in scalars:
        parts.append(f"reward {scalars['reward/mean']:.3f}")
    if accuracy is not None:
        parts.append(f"accuracy {accuracy:.3f}")
    if "rollout/tokens_per_s" in scalars:
        parts.append(f"{scalars['rollout/tokens_per_s']:.0f} tokens/s")
    phases = [f"{phase} {scalars[key]:.1f}" for phase in PHASES if (key := f"time/{phase}_s") in scalars]
    if phases:
        parts.append(f"{' '.join(phases)} s")
    if seconds_left is not None:
        parts.append(f"left {format_duration(seconds_left)}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """`m:ss`, from an hour on `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
