"""`megatron-rl loss-check`: the table and the exit status, on results that need no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import loss_check
from megatron_rl.cli.main import main
from megatron_rl.controller.loss_check import CASES, CheckResult, LossCheckError

BODY = """\
model: {family: llama, dims: {hidden_size: 8}}
data: {tokenizer: {kind: characters}, sources: [{name: sums, kind: reasoning_gym, task: chain_sum}]}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "exp.yaml"
    path.write_text(BODY)
    return str(path)


def results(loss_gap: float, gradient_gap: float) -> list[CheckResult]:
    first = CheckResult(CASES[0], 0.5, 2.0)
    return [first, *(CheckResult(case, 0.5, 2.0, loss_gap, gradient_gap) for case in CASES[1:])]


@pytest.mark.parametrize(
    ("gaps", "status", "words"),
    [
        ((1e-7, 2e-6), 0, "all layouts agree; largest difference: loss 1.0e-07, gradient norm 2.0e-06"),
        ((2e-5, 0.0), 1, "7 of 8 layouts differ"),
        ((0.0, 5e-5), 1, "6 of 8 layouts differ"),  # CP may differ by 1e-4
        ((float("nan"), 0.0), 1, "7 of 8 layouts differ"),
    ],
)
def test_the_table_and_the_exit_status(
    gaps: tuple[float, float], status: int, words: str, config: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(loss_check, "check_layouts", lambda *args, **kwargs: results(*gaps))
    assert main(["loss-check", config]) == status
    output = capsys.readouterr()
    assert words in output.out and output.out.count("\n") == len(CASES) + 2
    assert "a tiny llama, seed 1" in output.err


def test_json_and_overrides(config: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: dict[str, Any] = {}

    def check(section: Any, family: str, **options: Any) -> list[CheckResult]:
        seen.update(section=section, family=family, seed=options["seed"])
        options["report"]("DP 2: loss 0.5")
        return results(0.0, 0.0)

    monkeypatch.setattr(loss_check, "check_layouts", check)
    overrides = ["algorithm.clip_high=0.1", "--json", "--seed", "7"]
    assert main(["loss-check", config, *overrides]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert answer["all_equal"] and len(answer["layouts"]) == len(CASES)
    assert (seen["section"].clip_high, seen["family"], seen["seed"]) == (0.1, "llama", 7)
    assert "DP 2: loss 0.5" in output.err


def test_a_failed_rank_is_told(config: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> list[CheckResult]:
        raise LossCheckError("rank 1 died without an answer")

    monkeypatch.setattr(loss_check, "check_layouts", fail)
    assert main(["loss-check", config]) == 1
    assert "megatron-rl: rank 1 died without an answer" in capsys.readouterr().err


def test_a_contradiction_is_refused_before_anything_starts(config: str, capsys: Any) -> None:
    assert main(["loss-check", config, "algorithm.aggregation=token-mean"]) == 2
    assert "contradicts loss gspo: expected seq-mean-token-mean" in capsys.readouterr().err
