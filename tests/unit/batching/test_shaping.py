from __future__ import annotations

import pytest

from megatron_rl.batching.shaping import has_variance, punish_overlong, reward_of
from megatron_rl.config.algorithm_sections import OverlongSection
from megatron_rl.types.rollout import (
    FinishReason,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryState,
)

PROMPT = Prompt("sum-17", "2 + 3 =", (11,), "5", "sums")


def group_of(*answers: tuple[int, float, bool]) -> TrajectoryGroup:
    """(length, reward, is correct) of each trajectory."""
    trajectories = tuple(
        Trajectory(
            f"t{number}",
            PROMPT,
            (RolloutSegment((7,) * length, (-0.5,) * length, PolicyVersion(1), FinishReason.STOP),),
            TrajectoryState.DONE,
            RewardResult(reward, correct, {"kept": 1.0}),
        )
        for number, (length, reward, correct) in enumerate(answers)
    )
    return TrajectoryGroup("g", PROMPT, trajectories)


def test_long_answers_are_punished_and_their_correctness_stays() -> None:
    group = group_of((6, 1.0, True), (8, 1.0, True), (10, 0.0, False))
    shaped = punish_overlong(group, OverlongSection(buffer_tokens=4, max_tokens=10, coefficient=0.5))
    results = [reward_of(trajectory) for trajectory in shaped.trajectories]
    assert [r.reward for r in results] == [1.0, 0.75, -0.5]
    assert [r.is_correct for r in results] == [True, True, False]
    assert results[1].details == {"kept": 1.0, "overlong": -0.25}
    assert punish_overlong(group, OverlongSection()) is group


def test_an_all_correct_group_stays_uninformative_under_a_punishment() -> None:
    group = group_of((6, 1.0, True), (10, 1.0, True))
    shaped = punish_overlong(group, OverlongSection(buffer_tokens=4, max_tokens=10))
    assert has_variance(shaped, "reward") and not has_variance(shaped, "correctness")
    assert has_variance(group_of((6, 0.2, False), (6, 0.2, True)), "correctness")
    assert not has_variance(group_of((6, 0.1, False), (5, 0.1, True)), "reward")


@pytest.mark.parametrize("metric", ["correctness", "reward"])
def test_a_broken_reward_names_its_prompt(metric: str) -> None:
    with pytest.raises(ValueError, match="prompt sum-17: the reward is nan, expected a finite number"):
        has_variance(group_of((6, 1.0, True), (6, float("nan"), False)), metric)
