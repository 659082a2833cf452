"""What happens to a group's scores between the reward function and the advantages: length shaping, and who is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_rl.config.algorithm_sections import OverlongSection
from megatron_rl.rewards.length import soft_overlong_punishment
from megatron_rl.types.rollout import RewardResult, Trajectory, TrajectoryGroup


def punish_overlong(group: TrajectoryGroup, section: OverlongSection) -> TrajectoryGroup:
    """The group with DAPO's soft over-long punishment in its rewards (and under `overlong` in their details).

    `is_correct` stays what it was: filters and accuracy do not see the shaping.
    """
    if section.buffer_tokens is None:
        return group
    assert section.max_tokens is not None, "resolve the configuration first"
    shaped = []
    for trajectory in group.trajectories:
        result = reward_of(trajectory)
        length = len(trajectory.response_ids)
        punishment = section.coefficient * soft_overlong_punishment(length, section.max_tokens, section.buffer_tokens)
        details = {**result.details, "overlong": punishment}
        shaped.append(replace(trajectory, reward=replace(result, reward=result.reward + punishment, details=details)))
    return replace(group, trajectories=tuple(shaped))


def has_variance(group: TrajectoryGroup, metric: Literal["correctness", "reward"]) -> bool:
    """Whether the group's scores differ. Where the rewards do not, every group-relative advantage is 0.

    Under `correctness` a length punishment does not make an all-correct group look informative. Compared as max
    against min: the standard deviation of equal floats need not be exactly 0.
    """
    results = [reward_of(trajectory) for trajectory in group.trajectories]
    scores = [float(r.is_correct) if metric == "correctness" else r.reward for r in results]
    return max(scores) != min(scores)


def reward_of(trajectory: Trajectory) -> RewardResult:
    """Raises ValueError, naming the prompt, when it has no reward or one that is not finite."""
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.trajectory_id} has no reward: score it before building samples")
    if not np.isfinite(trajectory.reward.reward):
        name, value = trajectory.prompt.prompt_id, float(trajectory.reward.reward)
        raise ValueError(f"prompt {name}: the reward is {value}, expected a finite number")
    return trajectory.reward
