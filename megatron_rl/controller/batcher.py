"""Scored groups -> the batch of one training step, and reference answers -> the batch of a warm-start step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.batching.build import build_train_batch
from megatron_rl.batching.replay import ReplayBuffer, ScoredGroup
from megatron_rl.batching.samples import build_samples
from megatron_rl.batching.shaping import has_variance, punish_overlong, reward_of
from megatron_rl.batching.shared_prompts import AUTO_MIN_PROMPT_TOKENS
from megatron_rl.config.sections import RunSection, TrainerSection
from megatron_rl.data.bundle import SftPair
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.rollout import FinishReason, Trajectory, TrajectoryGroup
from megatron_rl.types.training import TrainBatch, TrainSample


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One training step, cut for the policy's layout and for those of a critic and a reference on ranks of their own.

    Minibatches hold the same samples in all.
    """

    policy: TrainBatch
    critic: TrainBatch | None = None
    reference: TrainBatch | None = None


class Batcher:
    """Cuts samples into minibatches, data-parallel shares and packed microbatches.

    `critic_layout`, `reference_layout`: of those that have ranks of their own. `shares_prompts`: whether all these ranks can
    compute the prompt of a group once (`RankGroup.start` knows).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        trainer: TrainerSection,
        layout: ParallelLayout,
        run: RunSection,
        critic_layout: ParallelLayout | None = None,
        reference_layout: ParallelLayout | None = None,
        *,
        shares_prompts: bool = False,
    ) -> None:
        self._algorithm, self._trainer, self._run = algorithm, trainer, run
        self._layout, self._critic_layout, self._reference_layout = layout, critic_layout, reference_layout
        self._replay = ReplayBuffer(algorithm.section.replay)
        least = {"auto": AUTO_MIN_PROMPT_TOKENS, "on": 1, "off": None}[trainer.shared_prompts]
        self._min_shared_prompt = least if shares_prompts else None

    def build(self, groups: Sequence[TrajectoryGroup], step: int, oldest_version: int = 0) -> StepBatch | None:
        """The batch of a training step; tokens of `groups` that versions before `oldest_version` sampled get no loss.

        None when nothing is left to train: every group was left out for want of variance, or every token is too old. Raises
        ValueError, naming the prompt, for a reward that is missing or not finite.
        """
        section = self._algorithm.section
        groups = [punish_overlong(group, section.overlong_punishment) for group in groups]
        if section.skip_zero_variance_groups:
            groups = [group for group in groups if has_variance(group, section.group_filter_metric)]
        if not groups:
            return None
        rewards = [[reward_of(t).reward for t in group.trajectories] for group in groups]
        counts = [[self._num_trained(t) for t in group.trajectories] for group in groups]
        advantages = [advantages_G.tolist() for advantages_G in self._algorithm.group_advantages(rewards, counts)]
        samples = build_samples(groups, advantages, section.mask_truncated, oldest_version)
        if self._replay.is_on:
            replayed = self._replay.draw(np.random.default_rng([self._run.seed, step]))
            samples += [sample for group in replayed for sample in group.samples]
            whole = iter(build_samples(groups, advantages, section.mask_truncated))  # replay is old on purpose
            self._replay.add([ScoredGroup(tuple(islice(whole, len(group.trajectories)))) for group in groups])
        if oldest_version and not any(sample.loss_mask_L.any() for sample in samples):
            return None
        num_parts = self._trainer.minibatches_per_step, self._trainer.inner_epochs
        others = (self._critic_layout, self._reference_layout)
        return StepBatch(
            self._pack(self._layout, samples, *num_parts, step),
            *(None if layout is None else self._pack(layout, samples, *num_parts, step) for layout in others),
        )

    def _num_trained(self, trajectory: Trajectory) -> int:
        is_masked = self._algorithm.section.mask_truncated and trajectory.finish_reason is FinishReason.LENGTH
        return 0 if is_masked else sum(trajectory.response_loss_mask)

    def state_dict(self) -> dict[str, np.ndarray]:
        """The replay buffer, for a checkpoint."""
        return self._replay.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on with what `state_dict` gave."""
        self._replay.load_state_dict(state)

    def build_supervised(self, pairs: Sequence[SftPair], step: int) -> TrainBatch:
        """The batch of one supervised step: the loss mask is the answer."""
        return self._pack(self._layout, [_supervised_sample(number, pair) for number, pair in enumerate(pairs)], 1, 1, step)

    def _pack(
        self, layout: ParallelLayout, samples: list[TrainSample], num_minibatches: int, inner_epochs: int, step: int
    ) -> TrainBatch:
        return build_train_batch(
            samples,
            dp_size=layout.dp,
            num_minibatches=min(num_minibatches, len(samples)),
            inner_epochs=inner_epochs,
            max_tokens_per_microbatch=self._trainer.max_tokens_per_microbatch,
            microbatch_multiple=layout.pp if layout.virtual_pp > 1 else 1,
            length_multiple=2 * layout.cp if layout.cp > 1 else 1,
            seed=self._run.seed * 1_000_003 + step,
            min_shared_prompt=self._min_shared_prompt,
            counts_masked=self._algorithm.section.masked_sequences == "count",
        )


def _supervised_sample(number: int, pair: SftPair) -> TrainSample:
    num_prompt, num_answer = len(pair.prompt_ids), len(pair.answer_ids)
    length = num_prompt + num_answer
    return TrainSample(
        sample_id=f"warm-start/{number}",
        group_id=f"warm-start/{number}",
        token_ids_L=np.array((*pair.prompt_ids, *pair.answer_ids), dtype=np.int64),
        loss_mask_L=np.arange(length) >= max(num_prompt, 1),
        rollout_logprobs_L=np.zeros(length, dtype=np.float32),
        versions_L=np.full(length, -1, dtype=np.int32),
        reward=0.0,
        advantage=0.0,
        is_correct=True,
        is_truncated=False,
    )


def share_of(batch: TrainBatch, dp_rank: int) -> TrainBatch:
    """The batch with the microbatches of one data-parallel rank only; the denominators stay global."""
    minibatches = tuple(replace(m, microbatches=(m.microbatches[dp_rank],)) for m in batch.minibatches)
    return replace(batch, minibatches=minibatches)
