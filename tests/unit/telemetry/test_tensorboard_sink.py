"""TensorBoard's own reader returns what was recorded, the same as metrics.jsonl."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.telemetry.jsonl_sink import JsonlSink
from megatron_rl.telemetry.telemetry import Telemetry
from megatron_rl.telemetry.tensorboard_sink import TensorBoardSink


def test_tensorboard_and_jsonl_hold_the_same_values(tmp_path: Path) -> None:
    telemetry = Telemetry([JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")])
    rng = np.random.default_rng(3)
    for step in range(1, 6):
        with telemetry.step(step), telemetry.span("train"):
            telemetry.record({"loss/policy": rng.normal(), "learning_rate": 10.0 ** rng.uniform(-9, -3)})
            telemetry.text("samples", [f"step {step}: 2 + 2 = *4*", "two\nlines"])
        reader = EventAccumulator(str(tmp_path / "tensorboard"))
        reader.Reload()
        assert [event.step for event in reader.Scalars("loss/policy")] == list(range(1, step + 1)), "on disk at once"
    telemetry.close()

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = set(records[0]) - {"step"}
    assert set(reader.Tags()["scalars"]) == names == {"loss/policy", "learning_rate", "time/train_s", "time/step_s"}
    for name in names:
        read = {event.step: event.value for event in reader.Scalars(name)}
        assert read == {record["step"]: np.float32(record[name]) for record in records}
    texts = reader.Tensors("samples")
    assert [event.step for event in texts] == [1, 2, 3, 4, 5]
    assert list(texts[2].tensor_proto.string_val) == [b"    step 3: 2 + 2 = *4*", b"    two\n    lines"]


def test_needs_no_torch() -> None:
    code = "import sys, megatron_rl.telemetry.tensorboard_sink; assert not {'torch', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
