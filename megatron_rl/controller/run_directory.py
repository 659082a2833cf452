"""The run directory: what an experiment leaves on disk, and where."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUBDIRECTORIES = ("tensorboard", "rollouts", "checkpoints", "logs")


class RunDirectoryError(ValueError):
    """The run directory cannot be used; the message is one line."""


class RunDirectory:
    """`resolved.yaml, git_revision, metrics.jsonl, tensorboard/, rollouts/, checkpoints/, logs/`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def create(self, resolved_yaml: str, *, overwrite: bool) -> None:
        """Make the directory. Raises RunDirectoryError when it already holds a run and `overwrite` is off."""
        if self.metrics_file.exists():
            if not overwrite:
                raise RunDirectoryError(
                    f"{self.path}: already holds a run; choose another run.name, or set run.overwrite=true"
                )
            self.metrics_file.unlink()
        for name in SUBDIRECTORIES:
            directory = self.path / name
            directory.mkdir(parents=True, exist_ok=True)
            if name in ("tensorboard", "rollouts"):
                for old in directory.iterdir():
                    old.unlink()
        write_atomically(self.path / "resolved.yaml", resolved_yaml)
        write_atomically(self.path / "git_revision", git_revision() + "\n")

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The samples of one step that are kept as text, one JSON object per line."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(self.path / "rollouts" / f"step-{step:06d}.jsonl", lines)


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def git_revision() -> str:
    """The revision of this source tree, with `-dirty` when it has changes; `unknown` outside a repository."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logging.getLogger(__name__).warning("git_revision: %s", error)
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
