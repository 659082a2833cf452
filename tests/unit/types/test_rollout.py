"""A trajectory reads as one answer whatever the number of its segments."""

from __future__ import annotations

import pytest

from megatron_rl.types.rollout import (
    FinishReason,
    PolicyVersion,
    Prompt,
    RolloutSegment,
    Trajectory,
    TrajectoryState,
)

PROMPT = Prompt("p", "2 + 3 =", (1, 2), "5", "sums")


def segment(token_ids: tuple[int, ...], version: int, reason: FinishReason) -> RolloutSegment:
    return RolloutSegment(token_ids, tuple(-0.5 * t for t in token_ids), PolicyVersion(version), reason)


def test_segments_join() -> None:
    segments = (segment((7, 8), 3, FinishReason.SWITCH), segment((9,), 4, FinishReason.STOP))
    trajectory = Trajectory("t", PROMPT, segments, TrajectoryState.DONE)
    assert trajectory.response_ids == (7, 8, 9)
    assert trajectory.response_logprobs == (-3.5, -4.0, -4.5)
    assert trajectory.response_versions == (3, 3, 4)
    assert trajectory.finish_reason is FinishReason.STOP


def test_nothing_sampled_yet() -> None:
    trajectory = Trajectory("t", PROMPT, (), TrajectoryState.WAITING)
    assert trajectory.response_ids == trajectory.response_versions == ()
    assert trajectory.finish_reason is None


def test_every_token_has_its_log_prob() -> None:
    with pytest.raises(ValueError, match="3 tokens but 1 log-probs"):
        RolloutSegment((1, 2, 3), (-1.0,), PolicyVersion(0), FinishReason.STOP)
