"""Trajectory groups -> training samples: ids, masks, behaviour log-probs and versions, all token-aligned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.batching.shaping import reward_of
from megatron_rl.types.rollout import FinishReason, Trajectory, TrajectoryGroup
from megatron_rl.types.routing import unknown_expert
from megatron_rl.types.training import TrainSample


def build_samples(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[Sequence[float]],
    mask_truncated: bool,
    oldest_version: int = 0,
) -> list[TrainSample]:
    """One sample per trajectory, in the order of the groups.

    `advantages[g][i]` is the scalar of trajectory i of group g. With `mask_truncated` (DAPO's over-long filter,
    arXiv 2503.14476) a trajectory that ended on the length limit keeps its place in the batch but trains no token. Tokens
    that a version before `oldest_version` sampled, that no policy sampled or that a generate function left out train
    nothing either.

    Raises ValueError when the shapes disagree, a trajectory has no reward, or a reward or advantage is not finite.
    """
    if len(groups) != len(advantages):
        raise ValueError(f"{len(groups)} groups but advantages for {len(advantages)}")
    samples = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        if len(group.trajectories) != len(group_advantages):
            raise ValueError(
                f"group {group.group_id}: {len(group.trajectories)} trajectories but {len(group_advantages)} advantages"
            )
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            samples.append(_build_sample(trajectory, group.group_id, float(advantage), mask_truncated, oldest_version))
    return samples


def _build_sample(
    trajectory: Trajectory, group_id: str, advantage: float, mask_truncated: bool, oldest_version: int
) -> TrainSample:
    result = reward_of(trajectory)
    if not np.isfinite(advantage):
        raise ValueError(f"trajectory {trajectory.trajectory_id}: the advantage is {advantage}, expected a finite number")
    num_prompt = len(trajectory.prompt.token_ids)
    response = trajectory.response_ids
    length = num_prompt + len(response)
    is_truncated = trajectory.finish_reason is FinishReason.LENGTH

    loss_mask_L = np.zeros(length, dtype=bool)
    if not (mask_truncated and is_truncated):
        loss_mask_L[num_prompt:] = trajectory.response_loss_mask
    if num_prompt == 0 and length:
        loss_mask_L[0] = False  # nothing precedes the first token, so it has no log-prob
    rollout_logprobs_L = np.zeros(length, dtype=np.float32)
    rollout_logprobs_L[num_prompt:] = trajectory.response_logprobs
    versions_L = np.full(length, -1, dtype=np.int32)
    versions_L[num_prompt:] = trajectory.response_versions
    loss_mask_L[num_prompt:] &= versions_L[num_prompt:] >= oldest_version
    return TrainSample(
        sample_id=trajectory.trajectory_id,
        group_id=group_id,
        token_ids_L=np.array((*trajectory.prompt.token_ids, *response), dtype=np.int64),
        loss_mask_L=loss_mask_L,
        rollout_logprobs_L=rollout_logprobs_L,
        versions_L=versions_L,
        reward=float(result.reward),
        advantage=advantage,
        is_correct=result.is_correct,
        is_truncated=is_truncated,
        num_prompt_tokens=num_prompt,
        experts_LYK=_join_experts(trajectory),
    )


def _join_experts(trajectory: Trajectory) -> np.ndarray | None:
    """The routed experts [L, Y, K] of all tokens, each by the version that sampled the token after it; None without any.

    A segment that continues an earlier one may bring rows for what was there before: those of the earlier one count. Rows of
    inserted tokens come with the turn after them.
    """
    known = [segment for segment in trajectory.segments if segment.experts is not None]
    if not known:
        return None
    first = known[0].experts
    assert first is not None
    stop = len(trajectory.prompt.token_ids)
    experts_LYK = np.full(
        (stop + len(trajectory.response_ids), *first.shape[1:]), unknown_expert(first.dtype), dtype=first.dtype
    )
    start = 0
    for number, segment in enumerate(trajectory.segments):
        if number and trajectory.segments[number - 1].is_sampled:
            start = stop - 1
        stop += len(segment.token_ids)
        if segment.experts is None or stop - 1 <= start:
            continue
        if len(segment.experts) < stop - 1 - start:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id}: segment {number} has routed experts for {len(segment.experts)} "
                f"tokens, expected at least {stop - 1 - start}"
            )
        experts_LYK[start : stop - 1] = segment.experts[len(segment.experts) - (stop - 1 - start) :]
    return experts_LYK
