"""TensorBoard event files by TensorBoard's own writer; needs neither torch nor TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Scalars (stored as float32) and sample texts. Every step is on disk when `record` returns."""

    def __init__(self, directory: Path) -> None:
        self._writer = EventFileWriter(str(directory))

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step, Summary(value=values))
        self._writer.flush()

    def text(self, step: int, name: str, lines: Sequence[str]) -> None:
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[_as_code(line).encode() for line in lines],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(lines))]),
        )
        metadata = create_summary_metadata(display_name=name, description="")
        self._write(step, Summary(value=[Summary.Value(tag=name, tensor=tensor, metadata=metadata)]))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _as_code(text: str) -> str:
    """TensorBoard renders texts as Markdown; a model's answer is shown as it is."""
    return "\n".join("    " + line for line in text.splitlines() or [""])
