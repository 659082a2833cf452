"""One step, cut for two layouts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.config.algorithm_sections import AlgorithmSection
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
from megatron_rl.types.training import Minibatch

VAPO = AlgorithmSection(name="vapo", advantage="gae", loss="ppo", clip_low=0.2, aggregation="token-mean")


@pytest.fixture
def groups() -> list[TrajectoryGroup]:
    made = []
    for number in range(3):
        prompt = Prompt(f"p{number}", "q", tuple(range(number + 2)), "a", "s")
        trajectories = []
        for index in range(4):
            length = 2 * number + index + 1
            segment = RolloutSegment((7,) * length, (-1.0,) * length, PolicyVersion(0), FinishReason.STOP)
            reward = RewardResult(float(index % 2), index % 2 == 1)
            trajectories.append(Trajectory(f"p{number}/{index}", prompt, (segment,), TrajectoryState.DONE, reward))
        made.append(TrajectoryGroup(f"p{number}", prompt, tuple(trajectories)))
    return made


def members(minibatch: Minibatch) -> list[int]:
    return sorted(int(i) for rank in minibatch.microbatches for m in rank for i in m.sample_index_S)


def test_policy_and_critic_get_the_same_minibatches(groups: list[TrajectoryGroup]) -> None:
    trainer = TrainerSection(minibatches_per_step=3, inner_epochs=2, max_tokens_per_microbatch=32)
    own = Batcher(build_algorithm(VAPO), trainer, ParallelLayout(dp=2), RunSection(), ParallelLayout(cp=2, pp=2, virtual_pp=2))
    batch = own.build(groups, step=5)
    assert batch is not None and batch.critic is not None
    assert [len(m.microbatches) for m in (*batch.policy.minibatches, *batch.critic.minibatches)] == [2] * 6 + [1] * 6
    for mine, theirs in zip(batch.policy.minibatches, batch.critic.minibatches, strict=True):
        assert members(mine) == members(theirs) and mine.denominators == theirs.denominators
        assert len(theirs.microbatches[0]) % 2 == 0
    assert sorted(np.concatenate([members(m) for m in batch.critic.minibatches[:3]]).tolist()) == list(range(12))


def test_a_critic_beside_the_policy_gets_its_batch(groups: list[TrajectoryGroup]) -> None:
    batch = Batcher(build_algorithm(VAPO), TrainerSection(), ParallelLayout(), RunSection()).build(groups, step=1)
    assert batch is not None and batch.critic is None
