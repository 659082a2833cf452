"""Every YAML under configs/ loads, passes the checks and resolves; overlays stand on the base and a small model."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import batch_equation, dump_yaml, resolve
from megatron_rl.config.sections import ExperimentConfig

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


def test_the_documentation_names_every_section() -> None:
    text = (CONFIGS.parent / "docs" / "configuration.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(ExperimentConfig)]


def test_the_documentation_names_every_dependency() -> None:
    """Every requirement of setup.py has its row."""
    text = (CONFIGS.parent / "docs" / "dependencies.md").read_text()
    rows = " ".join(line.split("|")[1].lower() for line in text.splitlines() if line.startswith("|"))
    tree = ast.parse((CONFIGS.parent / "setup.py").read_text())
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List)]
    texts = [item.value for node in lists for item in node.elts if isinstance(item, ast.Constant)]
    names = {re.match(r"[\w-]+", text).group().lower() for text in texts if re.search(r"[<>=]=|^\w[\w-]*$", text)}
    assert names >= {"numpy", "torch", "ray"}
    words = set(re.findall(r"[\w-]+", rows))
    assert names - words - {"megatron_rl"} == set()
