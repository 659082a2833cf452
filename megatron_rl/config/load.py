"""From a YAML file and command-line overrides to a checked experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.checks import check_experiment
from megatron_rl.config.construct import build_section
from megatron_rl.config.overlay import load_tree
from megatron_rl.config.provenance import Provenance
from megatron_rl.config.sections import ExperimentConfig


@dataclass(frozen=True, slots=True)
class LoadedExperiment:
    """An experiment and where each of its values was written."""

    config: ExperimentConfig
    provenance: Provenance


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> LoadedExperiment:
    """The experiment of `path` with `a.b=c` overrides, checked but not resolved.

    Raises `ConfigError`, one line with file, line, key path, what was expected and the nearest valid key.
    """
    tree = load_tree(Path(path), overrides)
    provenance = Provenance.from_tree(tree)
    config = build_section(ExperimentConfig, tree)
    provenance.reject(check_experiment(config))
    return LoadedExperiment(config, provenance)
