"""The golden numbers, through the command that a person runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import check
from variants import write_variants

HERE = Path(__file__).parent


def run_check(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "check.py"), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE.parents[1])


def test_every_case_matches() -> None:
    result = run_check(HERE / "data")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[0] == "150 of 150 cases match"
    excepted = [line for line in result.stdout.splitlines() if line.startswith("  excepted")]
    assert len(excepted) == 5 and all("DEFECT" in line for line in excepted)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_batches_and_parameters_match_plain_loops(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups of one and of three, an empty row, other clips, bounds, aggregations, ranks: the mapping reads them all."""
    count = write_variants(tmp_path, seed)
    status = check.main(tmp_path)
    output = capsys.readouterr().out
    assert output.splitlines()[0] == f"{count} of {count} cases match", output
    assert status == 0


def test_no_case_matches_by_accident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One number of every case is moved by 1e-3: whatever readings a case allows, none may match."""
    count = write_variants(tmp_path, 4)
    for path in tmp_path.glob("*.json"):
        contents = json.loads(path.read_text())
        for case in contents.get("cases", {}).values():
            key = next(key for key in ("loss", "adv", "weights", "mask", "value", "full") if key in case)
            case[key] = moved(case[key])
        path.write_text(json.dumps(contents))
    assert check.main(tmp_path) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[0] == f"0 of {count} cases match", output


def moved(value: Any) -> Any:
    """The first number of a nested list, and it alone, 1e-3 larger."""
    if not isinstance(value, list):
        return value + 1e-3
    first = next(index for index, item in enumerate(value) if item != [])
    return [moved(item) if index == first else item for index, item in enumerate(value)]


def test_a_wrong_value_an_unknown_case_and_a_forgotten_field_are_failures(tmp_path: Path) -> None:
    shutil.copy(HERE / "data" / "batch.json", tmp_path)
    contents = json.loads((HERE / "data" / "policy_losses.json").read_text())
    case = contents["cases"]["ppo_clip_0.2_token-mean"]
    wrong_grad = [list(row) for row in case["grad"]]
    wrong_grad[3][2] += 1e-5
    cases = {
        "ppo_clip_0.2_token-mean": {**case, "grad": wrong_grad},
        "ppo_dualclip_c3": contents["cases"]["ppo_dualclip_c3"],
        "an_objective_nobody_knows": {**case, "peer": "nobody"},
        "sapo_1.0_1.05": {**contents["cases"]["sapo_1.0_1.05"], "weights": [[1.0]]},
    }
    (tmp_path / "policy_losses.json").write_text(json.dumps({"cases": cases}))
    result = run_check(tmp_path)
    assert result.returncode == 1
    assert result.stdout.splitlines()[0] == "1 of 4 cases match", result.stdout + result.stderr
    assert "ppo_clip_0.2_token-mean: grad is" in result.stdout
    assert "an_objective_nobody_knows: not mapped" in result.stdout
    assert "sapo_1.0_1.05: not computed: weights" in result.stdout


def test_where_peers_disagree_a_difference_is_named_and_not_counted(tmp_path: Path) -> None:
    shutil.copy(HERE / "data" / "batch.json", tmp_path)
    contents = json.loads((HERE / "data" / "policy_losses.json").read_text())
    gspo = contents["cases"]["gspo_3e-4_4e-4_seqmean"]
    sapo = contents["cases"]["sapo_1.0_1.05"]
    cases = {"gspo_3e-4_4e-4_seqmean": {**gspo, "loss": gspo["loss"] + 1e-3}, "sapo_1.0_1.05": sapo}
    (tmp_path / "policy_losses.json").write_text(json.dumps({"cases": cases}))
    result = run_check(tmp_path)
    assert result.returncode == 0 and result.stdout.splitlines()[0] == "1 of 1 cases match", result.stdout
    assert "excepted  policy_losses.json: gspo_3e-4_4e-4_seqmean: loss is" in result.stdout
