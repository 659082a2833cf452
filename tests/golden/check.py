"""Compares `megatron_rl.algorithms` with numbers that other systems computed.

    python tests/golden/check.py DIRECTORY

DIRECTORY holds `batch.json` (the inputs) and any of the case files. Prints `N of M cases match`, then the cases that do
not, and those that are not to be reproduced with the reason. A case that no function of ours is known for does not
match. A case that leaves a parameter open (a clip that the peer's recipe fixes) matches when one of the readings that its
words allow has all of its numbers. Exit status 0 when all match.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import advantage_cases
import correction_cases
import exercise_cases
import numpy as np
import other_cases
import policy_cases
import torch
from case_text import Excepted, Unmapped
from golden_batch import GoldenBatch

DEFAULT_TOLERANCE = 1e-7
Compute = Callable[[str, Any, GoldenBatch, dict[str, Any]], Iterator[dict[str, Any]]]
FILES: dict[str, Compute] = {
    "advantages.json": advantage_cases.compute,
    "policy_losses.json": policy_cases.compute,
    "rollout_correction.json": correction_cases.compute,
    "kl.json": other_cases.compute_kl,
    "aggregation.json": other_cases.compute_aggregation,
    "misc.json": other_cases.compute_misc,
    "routing_replay.json": other_cases.compute_routing,
    "exercises.json": exercise_cases.compute,
}
VALUES = (
    "adv", "ret", "ret_row", "adv_whitened", "lambda_policy", "lam", "loss", "grad", "per_token", "weights", "mask",
    "masked_fraction", "value", "grad_of_token_mean", "full", "dp2_rank_losses", "dp2_mean", "out", "mean", "var", "keep",
    "phi", "values", "trl", "openrlhf", "replay_indices", "replay_probs", "replay_grad", "native_indices", "native_probs",
    "tokens_rerouted",
)  # fmt: skip
"""Fields of a case that are results (unless they name an input). Each must be computed."""
NOT_CHECKED = ("not mapped", "not computed")
FLOAT32_FILES = {"routing_replay.json": 2e-6}
"""Files whose note says that the peer computed in float32 (seven digits are printed)."""


def main(directory: Path) -> int:
    torch.set_num_threads(1)
    batch = GoldenBatch.load(directory)
    num_cases, failures, exceptions = 0, [], []
    for file, name, case, contents in iterate_cases(directory):
        label = f"{file}: {name}"
        try:
            problem = check_case(file, name, case, batch, contents)
        except Excepted as reason:
            exceptions.append(f"{label}: {reason}")
            continue
        num_cases += 1
        if problem and isinstance(case, dict) and "disagrees" in case and not problem.startswith(NOT_CHECKED):
            num_cases -= 1
            exceptions.append(f"{label}: {problem}, and the peers disagree among themselves: {case['disagrees']}")
        elif problem:
            failures.append(f"{label}: {problem}")
    print(f"{num_cases - len(failures)} of {num_cases} cases match")
    for line in failures:
        print(f"  DIFFERS   {line}")
    for line in exceptions:
        print(f"  excepted  {line}")
    return 1 if failures or num_cases == 0 else 0


def iterate_cases(directory: Path) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """(file, case name, case, whole file) over every JSON file but the inputs. An unknown file is cases that nobody
    maps.
    """
    for path in sorted(directory.glob("*.json")):
        if path.name == "batch.json":
            continue
        contents = json.loads(path.read_text())
        for name, case in contents.get("cases", contents).items():
            yield path.name, name, case, contents


def check_case(file: str, name: str, case: Any, batch: GoldenBatch, contents: dict[str, Any]) -> str | None:
    """None if the case is reproduced, else what differs. Raises `Excepted` for one that is not to be reproduced."""
    if isinstance(case, dict) and "DEFECT" in case:
        raise Excepted(f"DEFECT: {case['DEFECT']}")
    if file not in FILES:
        return f"{NOT_CHECKED[0]}: no such file of cases is known"
    problems: list[str] = []
    try:
        for ours in FILES[file](name, case, batch, contents):
            problem = check_reading(file, case, ours)
            if problem is None:
                return None
            problems.append(problem)
    except Unmapped as reason:
        return problems[0] if problems else f"{NOT_CHECKED[0]}: {reason}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        return f"{NOT_CHECKED[0]}: {type(error).__name__}: {error}"
    return problems[0] if problems else f"{NOT_CHECKED[0]}: no reading"


def check_reading(file: str, case: Any, ours: dict[str, Any]) -> str | None:
    """None if every number of the case is among `ours`, else what differs."""
    results = case if isinstance(case, dict) else {}
    forgotten = [key for key in VALUES if key in results and key not in ours and is_numbers(results[key])]
    if forgotten:
        return f"{NOT_CHECKED[1]}: {', '.join(forgotten)}"
    tolerance = DEFAULT_TOLERANCE
    if isinstance(case, dict):
        tolerance = case.get("tol", FLOAT32_FILES.get(file, DEFAULT_TOLERANCE))
    only = ours.pop("_mask", None)
    if not any(key in case for key in ours):
        return f"{NOT_CHECKED[1]}: no field of the case is a number of ours ({', '.join(ours)})"
    for key, value in ours.items():
        if key not in case:
            continue
        expected = {k: case[key][k] for k in value if k in case[key]} if key == "metrics" else case[key]
        if isinstance(value, dict):
            problem = compare_tree({k: value[k] for k in expected if k in value}, expected, tolerance)
        else:
            problem = compare(value, expected, tolerance, only if key == "ret" else None)
        if problem:
            return f"{key} {problem}"
    return None


def is_numbers(value: Any) -> bool:
    """A result, not a word about the case."""
    return isinstance(value, (int, float, list)) and not isinstance(value, bool)


def compare_tree(ours: Any, expected: Any, tolerance: float) -> str | None:
    """Compare nested dictionaries and lists of numbers and nulls."""
    if isinstance(ours, dict):
        problems = ((key, compare_tree(value, expected[key], tolerance)) for key, value in ours.items())
        return next((f"[{key}] {problem}" for key, problem in problems if problem), None)
    return compare(ours, expected, tolerance)


def compare(ours: Any, expected: Any, tolerance: float, only: np.ndarray | None = None) -> str | None:
    """Compare numbers, flat or ragged. `only` restricts to the tokens of a mask."""
    if ours is None or expected is None:
        return None if ours is expected else f"is {ours}, expected {expected}"
    left, right = flatten(ours), flatten(expected)
    if left.shape != right.shape:
        return f"has {left.size} numbers, expected {right.size}"
    if only is not None:
        left, right = left[only], right[only]
    error = np.abs(left - right)
    if not np.all(error <= tolerance):  # a NaN differs
        worst = int(np.nanargmax(np.where(np.isnan(error), np.inf, error)))
        return f"is {left[worst]:.10g} at {worst}, expected {right[worst]:.10g} (tolerance {tolerance:g})"
    return None


def flatten(values: Any) -> np.ndarray:
    """Numbers of any nesting, in order, fp64."""
    if isinstance(values, (list, tuple)):
        return np.concatenate([flatten(value) for value in values]) if values else np.zeros(0)
    return np.asarray(values.detach() if isinstance(values, torch.Tensor) else values, dtype=np.float64).reshape(-1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/golden/check.py DIRECTORY")
    sys.exit(main(Path(sys.argv[1])))
