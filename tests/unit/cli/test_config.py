"""What `megatron-rl config` prints is an experiment file that means the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import batch_equation, resolve


def test_output_reloads_and_shows_the_batch_equation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("model: {family: llama, path: p}\ndata: {sources: [{name: s, kind: jsonl, path: q}]}\n")
    assert main(["config", str(path), "run.name=x", "trainer.layout={tp: 2, num_ranks: 6}"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    config = load_experiment(tmp_path / "again.yaml").config
    assert config == resolve(load_experiment(path, ["run.name=x", "trainer.layout={tp: 2, num_ranks: 6}"]).config)
    assert (config.run.directory, config.trainer.layout.dp) == ("runs/x", 3)
    comments = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("# ")]
    assert comments == batch_equation(config).splitlines()
