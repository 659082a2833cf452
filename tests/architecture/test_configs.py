"""Every YAML under configs/ loads, passes the checks and resolves; overlays stand on the base and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import batch_equation, dump_yaml, resolve

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = ("base", "models", "algorithms", "clusters")
FILES = sorted(CONFIGS.rglob("*.yaml"))


def as_experiment(path: Path, folder: Path) -> Path:
    """`path` itself, or an experiment on top of it where it is an overlay."""
    if path.relative_to(CONFIGS).parts[0] not in OVERLAYS:
        return path
    model = "" if path.parent.name == "models" else "models/qwen3_moe_tiny, "
    experiment = folder / "experiment.yaml"
    experiment.write_text(
        f"defaults: [base/default, {model}{path}]\n"
        "data: {sources: [{name: words, kind: reasoning_gym, task: spell_backward}]}\n"
    )
    return experiment


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_loads_and_resolves(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    config = resolve(load_experiment(as_experiment(path, tmp_path)).config)
    assert batch_equation(config)
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_experiment(tmp_path / "again.yaml").config == config
    if path.parent.name == "algorithms":
        assert config.algorithm.name == path.stem


def test_every_overlay_folder_is_there() -> None:
    assert {path.relative_to(CONFIGS).parts[0] for path in FILES} >= set(OVERLAYS)
