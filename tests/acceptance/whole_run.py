"""One whole run of the command, and what a campaign says of it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.controller.run_directory import git_revision
from tests.e2e.memory import peak_memory
from tests.e2e.runs import running


def train(config: str, seed: int, *overrides: str, timeout_s: float, means: Sequence[str] = ()) -> dict[str, object]:
    """One run to its end; its figures. `means`: metrics whose means over the steps are wanted too."""
    arguments = (f"run.seed={seed}", "telemetry.progress=plain", *overrides)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        with running(Path(folder) / "run", config, *arguments) as run, peak_memory(run.processes) as peak:
            run.wait_for("trainer ranks (", timeout_s)  # everything is up; the first step begins
            start_s = time.monotonic() - started
            status = run.wait(timeout_s)
            wall_s = time.monotonic() - started
            if status != 0:
                sys.exit(f"run failed with status {status}:\n{run.output[-3000:]}")
            run.check_nothing_left()
            rows = run.metrics()
    accuracies = {row["step"]: round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row}
    explained = {
        row["step"]: round(row["loss/explained_variance"], 3)
        for row in rows[1:]
        if row["step"] in accuracies and "loss/explained_variance" in row
    }
    steps = [row["time/step_s"] for row in rows[1:]]
    return {
        "command": f"megatron-rl train {config} {' '.join(arguments)}",
        "seed": seed,
        "revision": git_revision(),
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[max(accuracies)],
        "accuracies": accuracies,
        "wall_s": round(wall_s, 1),
        "start_s": round(start_s, 1),
        "step_s_median": round(sorted(steps)[len(steps) // 2], 2),
        "step_s_max": round(max(steps), 2),
        "logprob_gap_max": max(row["rollout/logprob_gap"] for row in rows[1:]),
        "clip_fraction_mean": round(sum(row["loss/clip_fraction"] for row in rows[1:]) / len(steps), 4),
        "peak_memory_gib": round(peak[0] / 2**30, 2),
        **({"means": {name: round(sum(row[name] for row in rows[1:]) / len(steps), 6) for name in means}} if means else {}),
        **({"explained_variance": explained} if explained else {}),
    }


def report(name: str, figures: dict[str, object], **bounds: bool) -> bool:
    """Print one JSON line; false when a bound is missed."""
    missed = [bound for bound, holds in bounds.items() if not holds]
    print(json.dumps({"campaign": name, **figures, "missed": missed}), flush=True)
    return not missed
