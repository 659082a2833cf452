"""The metrics of a step, from what its phases returned. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.rollout.collector import RolloutStats
from megatron_rl.types.rollout import NOT_SAMPLED, FinishReason, Trajectory, TrajectoryGroup

TRAINING_KEYS = ("loss/policy", "loss/clip_fraction", "loss/entropy", "loss/kl_to_rollout", "rollout/logprob_gap")
"""What every algorithm reports. A step that trained nothing reports 0 for them, so that every step has every key."""


def rollout_metrics(groups: Sequence[TrajectoryGroup], stats: RolloutStats, version: int) -> dict[str, float]:
    """Rewards, lengths, staleness and engine use of one batch, which trained `version`."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    fates = {f"tokens/{fate}": float(count) for fate, count in stats.token_fates.items()}
    bias = {
        "length/trained_over_sampled": stats.length_bias.trained_over_sampled,
        "length/bias_distance": stats.length_bias.distance,
    }
    if not trajectories:  # every group was filtered
        return {"rollout/efficiency": stats.efficiency, "rollout/tokens_per_s": stats.tokens_per_s} | bias | fates
    sampled = [v for t in trajectories for v in t.response_versions if v != NOT_SAMPLED]
    ages = version - np.array(sampled or [version])
    rewards = np.array([t.reward.reward for t in trajectories if t.reward is not None])
    correct = np.array([t.reward.is_correct for t in trajectories if t.reward is not None])
    failed = np.array([t.reward.details.get("failed", 0.0) for t in trajectories if t.reward is not None])
    lengths = np.array([len(t.response_ids) for t in trajectories])
    group_means = np.array([np.mean([t.reward.is_correct for t in g.trajectories if t.reward]) for g in groups])
    truncated = np.array([t.finish_reason is FinishReason.LENGTH for t in trajectories])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/failed_fraction": float(failed.mean()),
        "reward/std": float(rewards.std()),
        "reward/correct_fraction": float(correct.mean()),
        "reward/solved_groups_fraction": float((group_means == 1).mean()),
        "reward/failed_groups_fraction": float((group_means == 0).mean()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated_fraction": float(truncated.mean()),
        "rollout/efficiency": stats.efficiency,
        "rollout/num_tokens": float(stats.num_tokens),
        "rollout/tokens_per_s": stats.tokens_per_s,
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": float(ages.max()),
    } | _function_metrics(trajectories) | bias | fates


def _function_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of what generate functions report, over the trajectories that report it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {f"generate/{name}": float(np.mean([t.metrics[name] for t in trajectories if name in t.metrics])) for name in names}


def training_metrics(metrics: Mapping[str, float] | None, learning_rate: float) -> dict[str, float]:
    """What the trainers returned; zeros when the batch was empty (`learning_rate` is then the last one)."""
    if metrics is None:
        return dict.fromkeys(TRAINING_KEYS, 0.0) | {"grad_norm": 0.0, "learning_rate": learning_rate}
    return dict(metrics)


def accuracy(groups: Sequence[TrajectoryGroup]) -> float:
    """The share of correct trajectories, by the unshaped metric."""
    correct = [t.reward.is_correct for group in groups for t in group.trajectories if t.reward is not None]
    return float(np.mean(correct))


def sample_rows(groups: Sequence[TrajectoryGroup], texts: Sequence[Sequence[str]]) -> list[dict[str, object]]:
    """Readable rows of whole groups; `texts[g][i]` is the decoded response."""
    return [
        {
            "group": group.group_id,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "response": text,
            "reward": trajectory.reward.reward if trajectory.reward else None,
            "correct": trajectory.reward.is_correct if trajectory.reward else None,
            "finish_reason": trajectory.finish_reason.value if trajectory.finish_reason else None,
            "num_tokens": len(trajectory.response_ids),
            "versions": sorted(set(trajectory.response_versions) - {NOT_SAMPLED}),
        }
        for group, row in zip(groups, texts, strict=True)
        for trajectory, text in zip(group.trajectories, row, strict=True)
    ]
