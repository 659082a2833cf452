from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batching.samples import build_samples
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

PROMPT = Prompt("p0", "2 + 3 =", (11, 12, 13), "5", "arithmetic")


def make_trajectory(name: str, segments: list[RolloutSegment], reward: float | None = 1.0) -> Trajectory:
    result = None if reward is None else RewardResult(reward=reward, is_correct=reward > 0.5)
    return Trajectory(name, PROMPT, tuple(segments), TrajectoryState.DONE, result)


def make_segment(tokens: tuple[int, ...], version: int, finish: FinishReason) -> RolloutSegment:
    return RolloutSegment(tokens, tuple(-0.1 * t for t in tokens), PolicyVersion(version), finish)


@pytest.fixture
def group() -> TrajectoryGroup:
    whole = make_trajectory("t0", [make_segment((5, 6), 7, FinishReason.STOP)], 1.0)
    split = [make_segment((1, 2, 3), 7, FinishReason.SWITCH), make_segment((4,), 8, FinishReason.LENGTH)]
    return TrajectoryGroup("g0", PROMPT, (whole, make_trajectory("t1", split, 0.25)))


def test_arrays_are_token_aligned(group: TrajectoryGroup) -> None:
    first, second = build_samples([group], [[0.5, -0.5]], mask_truncated=False)
    assert second.token_ids_L.tolist() == [11, 12, 13, 1, 2, 3, 4]
    assert second.loss_mask_L.tolist() == [False] * 3 + [True] * 4
    assert second.versions_L.tolist() == [-1, -1, -1, 7, 7, 7, 8]
    assert second.num_prompt_tokens == 3
    np.testing.assert_allclose(second.rollout_logprobs_L, [0, 0, 0, -0.1, -0.2, -0.3, -0.4], rtol=1e-6)
    assert (second.reward, second.advantage, second.is_correct, second.is_truncated) == (0.25, -0.5, False, True)
    assert (first.sample_id, first.group_id, first.is_correct, first.is_truncated) == ("t0", "g0", True, False)
    assert [a.dtype for a in (first.token_ids_L, first.loss_mask_L, first.versions_L)] == [np.int64, np.bool_, np.int32]


def test_tokens_of_too_old_versions_train_nothing(group: TrajectoryGroup) -> None:
    first, second = build_samples([group], [[0.5, -0.5]], mask_truncated=False, oldest_version=8)
    assert not first.loss_mask_L.any()
    assert second.loss_mask_L.tolist() == [False] * 6 + [True]


def test_truncated_answers_are_masked_but_kept(group: TrajectoryGroup) -> None:
    first, second = build_samples([group], [[0.5, -0.5]], mask_truncated=True)
    assert first.loss_mask_L.sum() == 2
    assert second.loss_mask_L.sum() == 0 and second.advantage == -0.5


def test_a_missing_or_broken_reward_names_its_owner(group: TrajectoryGroup) -> None:
    unscored = replace(group, trajectories=(replace(group.trajectories[0], reward=None),))
    with pytest.raises(ValueError, match="trajectory t0 has no reward"):
        build_samples([unscored], [[0.0]], mask_truncated=False)
    broken = replace(group.trajectories[0], reward=RewardResult(float("nan"), False))
    with pytest.raises(ValueError, match="prompt p0: the reward is nan"):
        build_samples([replace(group, trajectories=(broken,))], [[0.0]], mask_truncated=False)
    with pytest.raises(ValueError, match="trajectory t1: the advantage is inf"):
        build_samples([group], [[0.0, float("inf")]], mask_truncated=False)


def test_shapes_must_agree(group: TrajectoryGroup) -> None:
    with pytest.raises(ValueError, match="1 groups but advantages for 2"):
        build_samples([group], [[0.0, 0.0], [1.0]], mask_truncated=False)
    with pytest.raises(ValueError, match="group g0: 2 trajectories but 1 advantages"):
        build_samples([group], [[0.0]], mask_truncated=False)


def with_experts(segment: RolloutSegment, rows: list[int]) -> RolloutSegment:
    """One layer, one expert: the row's number."""
    return replace(segment, experts=np.array(rows, dtype=np.uint8).reshape(-1, 1, 1))


def test_experts_are_those_of_the_version_that_sampled_the_next_token() -> None:
    """Prompt of 3; two segments in one answer of the engine, then a request of its own, which brings rows for everything."""
    first = with_experts(make_segment((1, 2), 7, FinishReason.SWITCH), [10, 11, 12, 13])
    second = with_experts(make_segment((3,), 8, FinishReason.ABORT), [24])
    third = with_experts(make_segment((4, 5), 9, FinishReason.STOP), [90, 91, 92, 93, 94, 35, 36])
    trajectory = make_trajectory("t0", [first, second, third])
    (sample,) = build_samples([TrajectoryGroup("g0", PROMPT, (trajectory,))], [[0.0]], mask_truncated=False)
    assert sample.experts_LYK is not None and sample.experts_LYK.dtype == np.uint8
    assert sample.experts_LYK[:, 0, 0].tolist() == [10, 11, 12, 13, 24, 35, 36, 255]


def test_missing_experts_are_unknown_and_too_few_are_refused() -> None:
    first = make_segment((1, 2), 7, FinishReason.SWITCH)
    second = with_experts(make_segment((3, 4), 8, FinishReason.STOP), [24, 25])
    group = TrajectoryGroup("g0", PROMPT, (make_trajectory("t0", [first, second]),))
    (sample,) = build_samples([group], [[0.0]], mask_truncated=False)
    assert sample.experts_LYK is not None
    assert sample.experts_LYK[:, 0, 0].tolist() == [255] * 4 + [24, 25, 255]
    empty = make_trajectory("t1", [make_segment((), 7, FinishReason.ABORT)])
    (none,) = build_samples([TrajectoryGroup("g0", PROMPT, (empty,))], [[0.0]], mask_truncated=False)
    assert none.experts_LYK is None
    short = make_trajectory("t2", [with_experts(first, [10, 11, 12])])
    with pytest.raises(ValueError, match="trajectory t2: segment 0 has routed experts for 3 tokens, expected at least 4"):
        build_samples([TrajectoryGroup("g0", PROMPT, (short,))], [[0.0]], mask_truncated=False)


def test_inserted_tokens_and_those_of_masked_turns_train_nothing() -> None:
    second = replace(make_segment((8,), 9, FinishReason.STOP), has_loss=False)
    turns = [make_segment((5, 6), 7, FinishReason.STOP), inserted_segment((50, 51)), second]
    group = TrajectoryGroup("g0", PROMPT, (make_trajectory("t0", turns),))
    for oldest_version in (-2, 0):
        (sample,) = build_samples([group], [[0.5]], mask_truncated=True, oldest_version=oldest_version)
        assert sample.token_ids_L.tolist() == [11, 12, 13, 5, 6, 50, 51, 8]
        assert sample.loss_mask_L.tolist() == [False] * 3 + [True, True] + [False] * 3
        assert sample.versions_L.tolist() == [-1, -1, -1, 7, 7, -1, -1, 9]
        np.testing.assert_allclose(sample.rollout_logprobs_L, [0, 0, 0, -0.5, -0.6, 0, 0, -0.8], rtol=1e-6)


def test_the_turn_behind_inserted_tokens_brings_their_experts() -> None:
    first = with_experts(make_segment((5, 6), 7, FinishReason.STOP), [10, 11, 12, 13])
    last = with_experts(make_segment((8, 9), 8, FinishReason.STOP), [90, 91, 92, 93, 24, 25, 26, 27])
    trajectory = make_trajectory("t0", [first, inserted_segment((50, 51)), last])
    (sample,) = build_samples([TrajectoryGroup("g", PROMPT, (trajectory,))], [[0.5]], mask_truncated=False)
    assert sample.experts_LYK is not None
    assert sample.experts_LYK[:, 0, 0].tolist() == [10, 11, 12, 13, 24, 25, 26, 27, 255]
