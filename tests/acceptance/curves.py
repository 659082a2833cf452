"""A picture of accuracy by step from the JSON lines that the campaigns print.

    bash launch/acceptance.sh smollm2 | tee lines.jsonl
    .venv/bin/python -m tests.acceptance.curves "SmolLM2-135M" docs/figures/smollm2.svg < lines.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.hashsalt"] = "megatron_rl"  # equal input, equal file


def read_curves(lines: Iterable[str]) -> list[tuple[str, list[int], list[float]]]:
    """(label, steps, accuracies) of every line that has a curve. Lines that are no JSON are skipped: runs print others."""
    curves = []
    for line in lines:
        row = json.loads(line) if line.startswith("{") else {}
        if "accuracies" in row:
            points = sorted((int(step), accuracy) for step, accuracy in row["accuracies"].items())
            label = f"{row['campaign']}, seed {row['seed']}"
            curves.append((label, [step for step, _ in points], [accuracy for _, accuracy in points]))
    return curves


def draw(title: str, curves: list[tuple[str, list[int], list[float]]]) -> Figure:
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, steps, accuracies in curves:
        axes.plot(steps, accuracies, marker="o", markersize=3, label=label)
    axes.set(title=title, xlabel="training step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("title")
    parser.add_argument("file", type=Path, help="the SVG to write")
    args = parser.parse_args()
    curves = read_curves(sys.stdin)
    if not curves:
        sys.exit("no line on stdin has accuracies; pipe in what launch/acceptance.sh printed")
    partial = args.file.with_suffix(".partial.svg")
    draw(args.title, curves).savefig(partial, metadata={"Date": None})
    os.replace(partial, args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
