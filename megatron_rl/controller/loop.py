"""The training loop: collect, batch, train, publish. It knows no Ray, no Megatron and no engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from megatron_rl.config.sections import (
    CriticSection,
    OptimizerSection,
    RunSection,
    TrainerSection,
    ValuePretrainingSection,
)
from megatron_rl.controller.batcher import Batcher, StepBatch
from megatron_rl.controller.metrics import accuracy, rollout_metrics, sample_rows, training_metrics
from megatron_rl.controller.run_directory import RunDirectory
from megatron_rl.data.bundle import DataBundle, SftPair
from megatron_rl.data.curriculum_sampler import CurriculumSampler
from megatron_rl.rollout.collector import Collector, RolloutStats
from megatron_rl.rollout.producer import Producer
from megatron_rl.scheduling.length_bias import LengthBias
from megatron_rl.telemetry.telemetry import Telemetry
from megatron_rl.types.rollout import PolicyVersion, Prompt, SamplingParams, TrajectoryGroup
from megatron_rl.types.training import TrainBatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Trainers(Protocol):
    """The ranks of the policy and of its critic as the loop sees them."""

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None: ...

    async def train_step(self, batch: StepBatch, version: int) -> dict[str, float]: ...

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]: ...

    async def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None: ...

    async def value_step(self, batch: StepBatch) -> dict[str, float]: ...


class Publisher(Protocol):
    """What brings the trainers' weights to the engines."""

    async def publish(self, pause_mode: str | None = None) -> PolicyVersion: ...


class PhaseTimeoutError(RuntimeError):
    """A phase took longer than `run.deadline_s`; the message is one line."""


class TrainingLoop:
    """One run: warm start, value pretraining, then `num_steps` training steps. What generates beside them is the producer's
    schedule. `critic` None: the algorithm reads no values.
    """

    def __init__(
        self,
        run: RunSection,
        trainer: TrainerSection,
        critic: CriticSection | None,
        sampling: SamplingParams,
        eval_sampling: SamplingParams,
        *,
        data: DataBundle,
        pairs_of: Callable[[Sequence[Prompt]], list[SftPair]],
        decode: Callable[[Sequence[int]], str],
        producer: Producer,
        collector: Collector,
        batcher: Batcher,
        trainers: Trainers,
        weight_sync: Publisher,
        telemetry: Telemetry,
        directory: RunDirectory,
        length_bias_alarm: float = 0.1,
        curriculum: CurriculumSampler | None = None,
    ) -> None:
        self.run, self.trainer, self.critic = run, trainer, critic
        self.sampling, self.eval_sampling = sampling, eval_sampling
        self.data, self.pairs_of, self.decode = data, pairs_of, decode
        self.producer, self.collector, self.batcher = producer, collector, batcher
        self.trainers, self.weight_sync = trainers, weight_sync
        self.telemetry, self.directory = telemetry, directory
        self.version = PolicyVersion(0)
        self._learning_rate = 0.0
        self.curriculum = curriculum
        self._length_bias_alarm, self._is_alarmed = length_bias_alarm, False

    async def execute(self) -> None:
        """The whole run."""
        await self.warm_start()
        steps_per_step = self.trainer.minibatches_per_step * self.trainer.inner_epochs
        await self.trainers.begin_phase(self.trainer.optimizer, self.run.num_steps * steps_per_step)
        with self.telemetry.step(0):
            self.version = await self._phase("sync", self.weight_sync.publish())
            await self._evaluate(0)
            self.telemetry.record({"policy_version": self.version})
            if self.critic is not None:
                await self._begin_critic(self.critic)
        try:
            for step in range(1, self.run.num_steps + 1):
                with self.telemetry.step(step):
                    await self.run_step(step)
        finally:
            await self.producer.close()

    async def run_step(self, step: int) -> None:
        """One training step: rollouts, batch, optimizer steps, weight sync."""
        groups, rollout = await self._phase("rollout", self.producer.next_batch())
        trained_version = self.version
        batch = self.batcher.build(groups, step, self.producer.oldest_trained)
        trained = await self._train(batch)
        await self._phase("drain", self.producer.drain())
        self.version = await self._phase("sync", self.weight_sync.publish(self.producer.pause_mode))
        self.producer.on_version(self.version)
        if self._is_evaluated(step):
            await self._evaluate(step)
        self._report(step, groups, rollout, trained, trained_version)

    async def warm_start(self) -> None:
        """Supervised steps on reference answers, before RL."""
        section = self.trainer.warm_start
        if section.num_steps == 0:
            return
        optimizer = OptimizerSection(learning_rate=section.learning_rate, num_warmup_steps=section.num_warmup_steps)
        await self.trainers.begin_phase(optimizer, section.num_steps)
        for step in range(1, section.num_steps + 1):
            pairs = self.pairs_of(self.data.warm_start_sampler.next(section.batch_size))
            batch = self.batcher.build_supervised(pairs, step)
            metrics = await self._phase("warm_start", self.trainers.sft_step(batch))
            if step % 20 == 0 or step == section.num_steps:
                logger.info("warm start %d/%d: loss %.3f", step, section.num_steps, metrics["loss/supervised"])

    async def _begin_critic(self, critic: CriticSection) -> None:
        """Value pretraining, then the critic's schedule of RL."""
        assert critic.inner_epochs is not None, "resolve the configuration first"
        steps_per_step = self.trainer.minibatches_per_step * critic.inner_epochs
        if critic.pretraining.num_steps:
            optimizer = critic.pretraining.optimizer or replace(critic.optimizer, schedule="constant")
            await self.trainers.begin_critic_phase(optimizer, critic.pretraining.num_steps * steps_per_step)
            await self._pretrain_values(critic.pretraining)
        await self.trainers.begin_critic_phase(critic.optimizer, self.run.num_steps * steps_per_step)

    async def _pretrain_values(self, section: ValuePretrainingSection) -> None:
        """Steps of the critic alone on rollouts of the policy as it stands, until its values are good enough."""
        explained, step = 0.0, 0
        while step < section.num_steps and (section.explained_variance is None or explained < section.explained_variance):
            step += 1
            prompts = self.data.train_sampler.next(self.run.prompts_per_step)
            groups = await self._collect(prompts, self.run.samples_per_prompt, self.sampling, f"values-{step}")
            batch = self.batcher.build(groups, self.run.num_steps + step)
            if batch is None:  # every group was left out for want of variance
                continue
            metrics = await self._phase("value_pretraining", self.trainers.value_step(batch))
            explained = metrics["loss/explained_variance"]
            logger.info(
                "value pretraining %d/%d: value loss %.4f, explained variance %.3f",
                step, section.num_steps, metrics["loss/value"], explained,
            )  # fmt: skip
        self.telemetry.record({"value_pretraining/num_steps": step, "value_pretraining/explained_variance": explained})

    async def _collect(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: SamplingParams, tag: str
    ) -> list[TrajectoryGroup]:
        return await self._phase("rollout", self.collector.collect(prompts, num_samples, sampling, tag))

    async def _train(self, batch: StepBatch | None) -> dict[str, float] | None:
        if batch is None:
            return None
        return await self._phase("train", self.trainers.train_step(batch, self.version))

    async def _evaluate(self, step: int) -> None:
        """Accuracy on the held-out prompts; equal draws at every step, so that only the policy differs."""
        if self.run.eval_interval == 0:
            return
        with self.telemetry.span("eval"):
            groups = await self._deadline(
                "eval", self.collector.collect(self.data.eval_prompts, 1, self.eval_sampling, "eval")
            )
        self.telemetry.record({"eval/accuracy": accuracy(groups)})

    def _is_evaluated(self, step: int) -> bool:
        interval = self.run.eval_interval
        return interval > 0 and (step % interval == 0 or step == self.run.num_steps)

    def _report(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        rollout: RolloutStats,
        trained: dict[str, float] | None,
        trained_version: int,
    ) -> None:
        metrics = training_metrics(trained, self._learning_rate)
        self._learning_rate = metrics["learning_rate"]
        alarm = {"length/bias_alarm": float(self._check_lengths(rollout.length_bias))}
        times = {"time/generate_s": rollout.generate_s, "time/reward_s": rollout.reward_s}
        self.telemetry.record(
            {"policy_version": self.version} | times | alarm | rollout_metrics(groups, rollout, trained_version) | metrics
        )
        if self.curriculum is not None:
            self.telemetry.record(self.curriculum.metrics())
        shown = groups[: self.run.num_logged_samples]
        texts = [[self.decode(trajectory.response_ids) for trajectory in group.trajectories] for group in shown]
        rows = sample_rows(shown, texts)
        self.directory.write_rollouts(step, rows)
        self.telemetry.text("samples", [f"{r['prompt']!r} -> {r['response']!r} ({r['reward']})" for r in rows])

    def _check_lengths(self, bias: LengthBias) -> bool:
        """Whether the schedule prefers short answers; says so when it begins to."""
        is_alarming = bias.trained_over_sampled < 1.0 - self._length_bias_alarm
        if is_alarming and not self._is_alarmed:
            logger.warning(
                "trained answers have %.2f of the length of sampled ones (rollout.length_bias_alarm=%g): the schedule drops "
                "long ones; see tokens/dropped_* and docs/rollout.md",
                bias.trained_over_sampled, self._length_bias_alarm,
            )  # fmt: skip
        self._is_alarmed = is_alarming
        return is_alarming

    async def _phase(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        with self.telemetry.span(name):
            return await self._deadline(name, work)

    async def _deadline(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        scope = asyncio.timeout(self.run.deadline_s)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise PhaseTimeoutError(f"phase {name}: not done within run.deadline_s={self.run.deadline_s:.0f}") from None
