"""Steps, spans and fan-out, under a clock that the test moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from megatron_rl.telemetry.spans import Span
from megatron_rl.telemetry.telemetry import Telemetry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A metric sink and a span sink in one."""

    def __init__(self, fails_to_close: bool = False) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.spans: list[Span] = []
        self.num_closed = 0
        self._fails_to_close = fails_to_close

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append(("record", step, dict(scalars)))

    def text(self, step: int, name: str, lines: Sequence[str]) -> None:
        self.calls.append(("text", step, name, list(lines)))

    def begin_span(self, name: str) -> None:
        self.calls.append(("begin", name))

    def end_span(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.num_closed += 1
        if self._fails_to_close:
            raise OSError("disk full")


def test_a_step_hands_over_metrics_texts_and_phase_times() -> None:
    clock, sink = Clock(), Recorder()
    telemetry = Telemetry([sink], [sink], clock)
    clock.now = 101.0
    with telemetry.step(4):
        for seconds in (2.0, 3.0):
            with telemetry.span("generate"):
                clock.now += seconds
        with telemetry.span("train", track="trainer"):
            clock.now += 0.5
        telemetry.record({"reward/mean": 0.25})
        telemetry.text("samples", ["a"])
        telemetry.text("samples", ["b", "c"])
    assert sink.calls == [
        ("begin", "generate"),
        ("begin", "generate"),
        ("begin", "train"),
        ("text", 4, "samples", ["a", "b", "c"]),
        ("record", 4, {"reward/mean": 0.25, "time/generate_s": 5.0, "time/train_s": 0.5, "time/step_s": 5.5}),
    ]
    assert sink.spans == [
        Span("generate", 1.0, 2.0, 4, "loop"),
        Span("generate", 3.0, 3.0, 4, "loop"),
        Span("train", 6.0, 0.5, 4, "trainer"),
    ]
    with telemetry.step(5):
        pass
    assert sink.calls[-1] == ("record", 5, {"time/step_s": 0.0}), "nothing of a step leaks into the next"


def test_a_step_that_raises_reports_its_spans_only() -> None:
    clock, sink = Clock(), Recorder()
    telemetry = Telemetry([sink], [sink], clock)
    with pytest.raises(KeyError), telemetry.step(1), telemetry.span("sync"):
        clock.now += 7
        raise KeyError("engine")
    assert sink.calls == [("begin", "sync")]
    assert sink.spans == [Span("sync", 0.0, 7.0, 1, "loop")]
    with telemetry.step(2):
        telemetry.record({"x": 1.0})
    assert sink.calls[-1] == ("record", 2, {"x": 1.0, "time/step_s": 0.0})


def test_misuse_raises() -> None:
    telemetry = Telemetry()
    with pytest.raises(RuntimeError, match="metrics outside a step: a"):
        telemetry.record({"a": 1})
    with pytest.raises(RuntimeError, match="text outside a step: a"):
        telemetry.text("a", [])
    with pytest.raises(ValueError, match="recorded twice in step 3: a"), telemetry.step(3):
        telemetry.record({"a": 1, "b": 2})
        telemetry.record({"a": 1, "c": 2})
    with pytest.raises(RuntimeError, match="step 2 begins inside step 1"), telemetry.step(1), telemetry.step(2):
        pass


def test_close_reaches_every_sink_once() -> None:
    broken, whole = Recorder(fails_to_close=True), Recorder()
    with pytest.raises(OSError, match="disk full"):
        Telemetry([whole, broken], [whole]).close()
    assert (broken.num_closed, whole.num_closed) == (1, 1)
