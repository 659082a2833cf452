"""Scores -> batch: shaping, filter, masks and replay, in that order; and one step cut for two layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.config.algorithm_sections import AlgorithmSection, CorrectionSection, KlSection, OverlongSection, ReplaySection
from megatron_rl.config.sections import RunSection, TrainerSection
from megatron_rl.controller.batcher import Batcher
from megatron_rl.types.layout import ParallelLayout
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
from megatron_rl.types.training import Minibatch, TrainBatch


def group_of(name: str, *answers: tuple[int, float], finish: FinishReason = FinishReason.STOP) -> TrajectoryGroup:
    """(length, reward) of each answer; correct where the reward is above 1/2."""
    prompt = Prompt(name, "?", (1, 2), "!", "s")
    trajectories = tuple(
        Trajectory(
            f"{name}/{number}",
            prompt,
            (RolloutSegment((7,) * length, (-0.5,) * length, PolicyVersion(1), finish),),
            TrajectoryState.DONE,
            RewardResult(reward, reward > 0.5),
        )
        for number, (length, reward) in enumerate(answers)
    )
    return TrajectoryGroup(name, prompt, trajectories)


def build(groups: list[TrajectoryGroup], step: int = 1, batcher: Batcher | None = None, **changes: Any) -> TrainBatch | None:
    batch = (batcher or make_batcher(**changes)).build(groups, step)
    return None if batch is None else batch.policy


def make_batcher(**changes: Any) -> Batcher:
    section = replace(AlgorithmSection(advantage="dr_grpo"), **changes)
    return Batcher(build_algorithm(section), TrainerSection(), ParallelLayout(), RunSection())


def advantages_of(batch: TrainBatch | None) -> dict[tuple[int, float], float]:
    """(tokens, reward) of each sequence -> its advantage."""
    assert batch is not None
    result = {}
    for microbatch in batch.minibatches[0].microbatches[0]:
        for start, stop, reward in zip(
            microbatch.cu_seqlens[:-1], microbatch.cu_seqlens[1:], microbatch.rewards_S, strict=True
        ):
            result[int(stop - start), round(float(reward), 4)] = float(microbatch.token_arrays["advantages"][start])
    return result


def test_the_punishment_is_part_of_the_reward_and_not_of_the_filter() -> None:
    punished = {"overlong_punishment": OverlongSection(buffer_tokens=4, max_tokens=10)}
    correct = group_of("a", (4, 1.0), (8, 1.0))
    mixed = group_of("b", (5, 0.0), (7, 1.0))
    assert build([correct], skip_zero_variance_groups=True, **punished) is None
    batch = build([correct, mixed], skip_zero_variance_groups=True, **punished)
    assert advantages_of(batch) == {(7, 0.0): -0.375, (9, 0.75): 0.375}
    both = build([correct, mixed], skip_zero_variance_groups=True, group_filter_metric="reward", **punished)
    assert len(advantages_of(both)) == 4


def test_a_nan_reward_names_the_prompt() -> None:
    with pytest.raises(ValueError, match="prompt a: the reward is nan, expected a finite number"):
        build([group_of("a", (4, float("nan")), (5, 1.0))])


def test_truncated_answers_count_as_sequences_only_on_request() -> None:
    cut = group_of("a", (4, 0.0), (5, 1.0), finish=FinishReason.LENGTH)
    for rule, expected in (("leave_out", 0), ("count", 2)):
        batch = build([cut], mask_truncated=True, masked_sequences=rule)
        assert batch is not None
        assert (batch.minibatches[0].denominators.num_sequences, batch.minibatches[0].denominators.num_tokens) == (expected, 0)


def test_masked_answers_have_no_weight_in_the_whitening() -> None:
    section = {"advantage": "reinforce_pp", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2}
    groups = [group_of("a", (4, 0.0), (2, 1.0)), group_of("cut", (30, 9.0), (30, 9.0), finish=FinishReason.LENGTH)]
    advantages = advantages_of(build(groups, mask_truncated=True, **section))
    assert 4 * advantages[6, 0.0] + 2 * advantages[4, 1.0] == pytest.approx(0, abs=1e-6)


def test_old_groups_come_back_with_their_own_versions() -> None:
    batcher = make_batcher(replay=ReplaySection(num_groups=3), correction=CorrectionSection("tis"))
    first = build([group_of("a", (4, 0.0), (5, 1.0))], 1, batcher)
    second = build([group_of("b", (8, 0.0), (9, 1.0))], 2, batcher)
    assert first is not None and first.num_samples == 2
    assert second is not None and second.num_samples == 4
    assert set(advantages_of(second)) == {(6, 0.0), (7, 1.0), (10, 0.0), (11, 1.0)}
    np.testing.assert_allclose(sorted(advantages_of(second).values()), [-0.5, -0.5, 0.5, 0.5])


VAPO = AlgorithmSection(name="vapo", advantage="gae", loss="ppo", clip_low=0.2, aggregation="token-mean")
GROUPS = [group_of(name, *((2 * number + i + 1, float(i % 2)) for i in range(4))) for number, name in enumerate("abc")]


def members(minibatch: Minibatch) -> list[int]:
    return sorted(int(i) for rank in minibatch.microbatches for m in rank for i in m.sample_index_S)


def test_policy_and_critic_get_the_same_minibatches() -> None:
    trainer = TrainerSection(minibatches_per_step=3, inner_epochs=2, max_tokens_per_microbatch=32)
    own = Batcher(build_algorithm(VAPO), trainer, ParallelLayout(dp=2), RunSection(), ParallelLayout(cp=2, pp=2, virtual_pp=2))
    batch = own.build(GROUPS, step=5)
    assert batch is not None and batch.critic is not None
    assert [len(m.microbatches) for m in (*batch.policy.minibatches, *batch.critic.minibatches)] == [2] * 6 + [1] * 6
    for mine, theirs in zip(batch.policy.minibatches, batch.critic.minibatches, strict=True):
        assert members(mine) == members(theirs) and mine.denominators == theirs.denominators
        assert len(theirs.microbatches[0]) % 2 == 0
    assert sorted(np.concatenate([members(m) for m in batch.critic.minibatches[:3]]).tolist()) == list(range(12))


def test_a_reference_on_ranks_of_its_own_gets_the_same_samples() -> None:
    section = AlgorithmSection(loss="ppo", clip_low=0.2, clip_high=0.2, kl=KlSection(0.1))
    own = Batcher(
        build_algorithm(section), TrainerSection(), ParallelLayout(), RunSection(), reference_layout=ParallelLayout(dp=3)
    )
    batch = own.build(GROUPS, step=5)
    assert batch is not None and batch.critic is None and batch.reference is not None
    assert [len(m.microbatches) for m in batch.reference.minibatches] == [3]
    assert members(batch.reference.minibatches[0]) == members(batch.policy.minibatches[0])


def test_a_critic_beside_the_policy_gets_its_batch() -> None:
    batch = Batcher(build_algorithm(VAPO), TrainerSection(), ParallelLayout(), RunSection()).build(GROUPS, step=1)
    assert batch is not None and batch.critic is None
