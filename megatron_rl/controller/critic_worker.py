"""One rank of the critic: the part that a policy's rank holds when they take turns, and the worker that has ranks of its own.

Plain classes that an actor wraps and tests build without Ray. Every method is collective over the ranks of the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch

from megatron_rl.checkpoint.hf_folder import FolderSource, TensorSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.checkpoint.value_source import ZeroHeadSource
from megatron_rl.config.algorithm_sections import KlSection
from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.sample_scores import ScoresBySample, scores_by_sample
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.model_families.value_model import value_model_of
from megatron_rl.platforms.platform import Platform, select_platform
from megatron_rl.resharding.channel import Address
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.trainer.token_advantages import add_token_advantages
from megatron_rl.types.training import Microbatch, TrainBatch


class CriticPart:
    """Builds the critic of one rank and trains it on whole steps. `setup.layout` is the critic's here."""

    def __init__(self, setup: WorkerSetup, rank: int, platform: Platform) -> None:
        assert setup.critic is not None and setup.critic.inner_epochs is not None, "resolve the configuration first"
        self._setup, self._rank, self._section = setup, rank, setup.critic
        self._num_epochs = setup.critic.inner_epochs
        self.trainer = CriticTrainer(
            setup.model.dims,
            setup.dtype,
            replace(setup.section, optimizer=self._section.optimizer),
            setup.layout,
            platform,
            seed=setup.seed,
            vocab_multiple=setup.model.vocab_multiple,
        )
        if self._section.path is not None:
            self.load(FolderSource(self._section.path))

    @property
    def has_own_start(self) -> bool:
        """Whether it starts from a folder of its own, not from the policy."""
        return self._section.path is not None

    def load(self, source: TensorSource) -> None:
        """Take the weights of a value model."""
        setup = self._setup
        chunks = import_params(
            source,
            value_model_of(setup.model.family),
            setup.model.dims,
            setup.layout,
            self._rank,
            spec="te" if self.trainer.uses_transformer_engine else "local",
            vocab_multiple=setup.model.vocab_multiple,
            dtype=torch.float32,
        )
        self.trainer.load_parameters(chunks)

    def pretrain(self, batch: TrainBatch) -> dict[str, float]:
        """One step on Monte-Carlo returns: lambda 1, and no KL, since the policy is its own reference then."""
        section = replace(self._setup.algorithm, lambda_critic=1.0, kl=KlSection())
        valued = [self.trainer.annotate(minibatch.microbatches[0]) for minibatch in batch.minibatches]
        annotated, metrics = add_token_advantages(valued, section, self.trainer.sum_over_data_parallel)
        return metrics | self.train(annotated, batch)

    def train(self, minibatches: Sequence[Sequence[Microbatch]], batch: TrainBatch) -> dict[str, float]:
        """The optimizer steps of a training step; `minibatches` are those of `batch` with values and returns."""
        num_steps = len(minibatches) // self._setup.section.inner_epochs * self._num_epochs
        pairs = islice(cycle(zip(minibatches, batch.minibatches, strict=True)), num_steps)
        return mean_metrics([
            self.trainer.train_minibatch(
                microbatches, part.denominators, self._setup.algorithm, self._section.value_clip
            )
            for microbatches, part in pairs
        ])  # fmt: skip


class CriticWorker:
    """One rank of a critic that has ranks of its own."""

    def __init__(self, setup: WorkerSetup, rank: int, interface: str = "127.0.0.1") -> None:
        self._setup, self._rank, self._interface = setup, rank, interface
        self._annotated: list[list[Microbatch]] = []
        torch.set_num_threads(setup.section.num_threads)

    def free_address(self) -> Address:
        """This process's interface and a port that is free on it, for rank 0 to listen on."""
        return free_address(self._interface)

    def start(self, address: Address) -> bool:
        """Join the other ranks of the critic at its rank 0's address, build the model and load its first weights.

        Returns whether this model can compute the prompt of a group once (`trainer.shared_prompts`).
        """
        platform = join(self._setup, self._rank, address)
        assert self._setup.critic is not None
        self._part = CriticPart(self._setup, self._rank, platform)
        if self._setup.critic.path is None:
            self._part.load(ZeroHeadSource(self._setup.model.source()))
        return self._part.trainer.shares_prompts

    def load_policy(self, folder: str) -> None:
        """Start from an exported policy, with a head of zeros."""
        self._part.load(ZeroHeadSource(FolderSource(folder)))

    def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start value pretraining or RL: a schedule of its own and fresh Adam moments."""
        self._part.trainer.begin_phase(section, num_optimizer_steps)

    def value_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """Value pretraining. `batch` holds this rank's data-parallel share only. Metrics on rank 0."""
        metrics = self._part.pretrain(batch)
        return metrics if self._rank == 0 else None

    def compute_values(self, batch: TrainBatch) -> ScoresBySample:
        """The values of this rank's share, from one rank of each data-parallel position (empty from its replicas)."""
        self._annotated = [self._part.trainer.annotate(minibatch.microbatches[0]) for minibatch in batch.minibatches]
        return scores_by_sample([m for part in self._annotated for m in part], "values", self._setup.layout, self._rank)

    def train_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """Train on the batch of the last `compute_values`. Metrics on rank 0."""
        reduce_sum = self._part.trainer.sum_over_data_parallel
        annotated, metrics = add_token_advantages(self._annotated, self._setup.algorithm, reduce_sum)
        metrics |= self._part.train(annotated, batch)
        return metrics if self._rank == 0 else None

    def stop(self) -> None:
        destroy_distributed()


def join(setup: WorkerSetup, rank: int, address: Address) -> Platform:
    """Join the ranks of `setup.layout` at rank 0's address."""
    platform = select_platform(0)
    platform.prepare_megatron()
    init_distributed(
        platform,
        rank=rank,
        world_size=setup.layout.world_size,
        master_address=address[0],
        master_port=address[1],
        timeout_s=setup.start_timeout_s,
    )
    init_model_parallel(setup.layout, seed=setup.seed)
    return platform


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a training step: means over its optimizer steps; a learning rate is the last one's."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return means | {name: value for name, value in steps[-1].items() if name.endswith("learning_rate")}
