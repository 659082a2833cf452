"""One place that the loop tells what happened; it fans out to sinks once per step."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from megatron_rl.telemetry.spans import Span, SpanSink
from megatron_rl.types.protocols import MetricSink


class Telemetry:
    """Collects the scalars, texts and phase times of a step and hands them to every sink when the step ends.

        with telemetry.step(step):
            with telemetry.span("generate"):
                ...
            telemetry.record({"reward/mean": 0.5})

    Each span `x` that ends inside a step adds to `time/x_s`; the step itself is `time/step_s`. Spans may be opened from
    several threads.
    """

    def __init__(
        self,
        sinks: Sequence[MetricSink] = (),
        span_sinks: Sequence[SpanSink] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks, self._span_sinks, self._clock = tuple(sinks), tuple(span_sinks), clock
        self._origin_s = clock()
        self._lock = threading.Lock()
        self._step: int | None = None
        self._scalars: dict[str, float] = {}
        self._texts: dict[str, list[str]] = {}
        self._span_seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step. Its metrics reach the sinks when the block ends; a block that raises reports nothing."""
        if self._step is not None:
            raise RuntimeError(f"step {step} begins inside step {self._step}")
        self._step, start_s = step, self._clock()
        self._scalars, self._texts = {}, {}
        self._span_seconds.clear()
        try:
            yield
            with self._lock:
                self.record({f"time/{name}_s": seconds for name, seconds in self._span_seconds.items()})
            self.record({"time/step_s": self._clock() - start_s})
            for sink in self._sinks:
                for name, lines in self._texts.items():
                    sink.text(step, name, lines)
                sink.record(step, self._scalars)
        finally:
            self._step = None

    def record(self, scalars: Mapping[str, float]) -> None:
        """Adds to the metrics of the running step. Raises where a name was recorded already or no step runs."""
        if self._step is None:
            raise RuntimeError(f"metrics outside a step: {', '.join(scalars)}")
        if twice := self._scalars.keys() & scalars.keys():
            raise ValueError(f"metrics recorded twice in step {self._step}: {', '.join(sorted(twice))}")
        self._scalars.update(scalars)

    def text(self, name: str, lines: Sequence[str]) -> None:
        """Adds sample texts to the running step."""
        if self._step is None:
            raise RuntimeError(f"text outside a step: {name}")
        self._texts.setdefault(name, []).extend(lines)

    @contextmanager
    def span(self, name: str, track: str = "loop") -> Iterator[None]:
        """Times a block, also one that raises."""
        for sink in self._span_sinks:
            sink.begin_span(name)
        start_s = self._clock()
        try:
            yield
        finally:
            end_s = self._clock()
            with self._lock:
                self._span_seconds[name] += end_s - start_s
                span = Span(name, start_s - self._origin_s, end_s - start_s, self._step, track)
                for sink in self._span_sinks:
                    sink.end_span(span)

    def close(self) -> None:
        """Closes every sink, also those after one that raises."""
        sinks: dict[int, MetricSink | SpanSink] = {id(sink): sink for sink in self._sinks}
        sinks |= {id(sink): sink for sink in self._span_sinks}
        with ExitStack() as stack:
            for sink in sinks.values():
                stack.callback(sink.close)
