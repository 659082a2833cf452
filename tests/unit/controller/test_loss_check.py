"""The parent's side of loss-check, with real ranks: results are compared, and a rank that fails is reported at once."""

from __future__ import annotations

import time

import pytest

from megatron_rl.config.algorithm_sections import AlgorithmSection, CovarianceSection
from megatron_rl.controller import loss_check
from megatron_rl.controller.loss_check import CASES, CheckCase, CheckResult, LossCheckError, check_layouts
from megatron_rl.types.layout import ParallelLayout

COVARIANCE = AlgorithmSection(loss="clip_cov", clip_low=0.2, clip_high=0.2, covariance=CovarianceSection(0.2, 0.01, 50.0))


def test_one_and_two_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip-Cov: besides the denominators its choice of tokens must not see the split."""
    chosen = tuple(case for case in CASES if case.name in ("1 rank", "DP 2"))
    monkeypatch.setattr(loss_check, "CASES", chosen)
    lines: list[str] = []
    one, two = check_layouts(COVARIANCE, "llama", seed=3, report=lines.append, timeout_s=170.0)
    assert one.is_equal and two.is_equal and one.grad_norm > 1e-3
    assert [line.partition(" ")[0] for line in lines] == ["starting", "1", "starting", "DP"]


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "CASES", (CheckCase("DP 2", ParallelLayout(dp=2)),))
    started = time.monotonic()
    with pytest.raises(LossCheckError, match=r"rank [01] failed:\n(.|\n)*no_such_family"):
        check_layouts(COVARIANCE, "no_such_family", seed=1, report=lambda line: None, timeout_s=170.0)
    assert time.monotonic() - started < 170.0


def test_context_parallelism_may_round_the_gradient_more() -> None:
    for layout, is_equal in ((ParallelLayout(dp=2), False), (ParallelLayout(cp=2), True)):
        assert CheckResult(CheckCase("x", layout), 1.0, 1.0, 0.0, 5e-5).is_equal is is_equal
    assert not CheckResult(CheckCase("x", ParallelLayout()), 1.0, 1.0, float("nan"), 0.0).is_equal
