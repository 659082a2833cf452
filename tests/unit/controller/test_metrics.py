"""Metrics of a step: of one that trained nothing, and of one with tools."""

from __future__ import annotations

import pytest

from megatron_rl.controller.metrics import rollout_metrics, sample_rows, training_metrics
from megatron_rl.rollout.collector import RolloutStats
from megatron_rl.scheduling.length_bias import LengthBias
from megatron_rl.types.rollout import (
    FinishReason,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryState,
    inserted_segment,
)


def test_a_step_that_trained_nothing_has_every_key():
    metrics = training_metrics(None, 0.5)
    assert metrics["learning_rate"] == 0.5
    assert metrics["loss/clip_fraction"] == metrics["grad_norm"] == 0.0


def test_tools_count_in_means_and_not_as_old_tokens():
    def trajectory(name, metrics, *segments):
        prompt = Prompt("p", "q", (1,), "a", "s")
        return Trajectory(name, prompt, segments, TrajectoryState.DONE, RewardResult(0.5, True), metrics)

    def sampled(version, count):
        return RolloutSegment((5,) * count, (-1.0,) * count, PolicyVersion(version), FinishReason.STOP)

    group = TrajectoryGroup("g", Prompt("p", "q", (1,), "a", "s"), (
        trajectory("t0", {"calls": 3.0}, sampled(8, 2), inserted_segment((6, 6)), sampled(9, 1)),
        trajectory("t1", {"calls": 1.0, "cuts": 1.0}, sampled(9, 3)),
    ))  # fmt: skip
    stats = RolloutStats(1.0, 0.0, 6, 6.0, 0.5, {"trained": 6}, LengthBias(0.9, 0.2))
    metrics = rollout_metrics([group], stats, 9)
    assert metrics["generate/calls"] == 2.0 and metrics["generate/cuts"] == 1.0
    assert metrics["rollout/staleness_max"] == 1.0 and metrics["rollout/staleness_mean"] == pytest.approx(2 / 6)
    assert metrics["length/max"] == 5.0 and metrics["length/trained_over_sampled"] == 0.9
    assert [row["versions"] for row in sample_rows([group], [["a", "b"]])] == [[8, 9], [9]]
    nothing = rollout_metrics([], stats, 9)
    assert nothing["length/bias_distance"] == 0.2 and nothing["tokens/trained"] == 6
