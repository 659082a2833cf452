"""One trainer rank, of the policy and of what takes turns with it: a plain class that tests build without Ray.

Every method is collective over the ranks of a layout: the group calls it on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice

import torch

from megatron_rl.algorithms.algorithm import Algorithm, build_algorithm
from megatron_rl.checkpoint.hf_export import write_export_part
from megatron_rl.checkpoint.hf_folder import FolderSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.sections import CriticSection, KlSection, OptimizerSection
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.model_families.value_model import value_model_of
from megatron_rl.platforms.platform import select_platform
from megatron_rl.resharding.execute import Address, execute_send
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.token_advantages import add_token_advantages
from megatron_rl.types.resharding import ShardDigest
from megatron_rl.types.training import Microbatch, TrainBatch


class PolicyWorker:
    """One rank of the policy and, where the algorithm has them, of its reference and its critic."""

    def __init__(self, setup: WorkerSetup, rank: int, interface: str = "127.0.0.1") -> None:
        self._setup, self._rank, self._interface = setup, rank, interface
        self._algorithm = build_algorithm(setup.algorithm)
        torch.set_num_threads(setup.section.num_threads)

    def free_address(self) -> Address:
        """This process's interface and a port that is free on it, for rank 0 to listen on."""
        return free_address(self._interface)

    def start(self, address: Address) -> None:
        """Join the others at rank 0's address, build the model and load its first weights."""
        setup = self._setup
        platform = select_platform(0)
        platform.prepare_megatron()
        init_distributed(
            platform,
            rank=self._rank,
            world_size=setup.layout.world_size,
            master_address=address[0],
            master_port=address[1],
            timeout_s=setup.start_timeout_s,
        )
        init_model_parallel(setup.layout, seed=setup.seed)
        self._trainer = PolicyTrainer(
            setup.model.dims,
            setup.dtype,
            setup.section,
            setup.layout,
            platform,
            seed=setup.seed,
            temperature=setup.temperature,
            vocab_multiple=setup.model.vocab_multiple,
        )
        chunks = import_params(
            setup.model.source(),
            setup.model.family,
            setup.model.dims,
            setup.layout,
            self._rank,
            spec=self._spec,
            vocab_multiple=setup.model.vocab_multiple,
            dtype=torch.float32,
        )
        self._trainer.load_parameters(chunks)
        if setup.critic is not None:
            self._critic = self._build_critic(setup.critic)

    def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start the warm start or RL: a schedule of its own and fresh Adam moments. The reference, where the algorithm
        has one, is the policy at the beginning of the last phase, and so is a critic that has no folder of its own.
        """
        self._trainer.begin_phase(section, num_optimizer_steps)
        if self._setup.critic is not None and self._setup.critic.path is None:
            self._critic.load_policy(self._trainer.chunk_parameters())
        if "ref_logprobs" in self._algorithm.needs:
            chunks = self._trainer.chunk_parameters()
            self._reference = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in chunks]

    def train_step(self, batch: TrainBatch, version: int) -> dict[str, float] | None:
        """Annotate, then one optimizer step per minibatch. `batch` holds this rank's data-parallel share only; `version`
        is the policy being trained.

        Returns the metrics, averaged over the minibatches, on rank 0 and None elsewhere.
        """
        annotated, metrics = self._annotated(batch)
        steps = [
            self._trainer.train_minibatch(microbatches, minibatch.denominators, algorithm, policy_version=version)
            for (microbatches, algorithm), minibatch in zip(annotated, batch.minibatches, strict=True)
        ]
        metrics |= mean_metrics(steps)
        if self._setup.critic is not None:
            metrics |= self._train_critic([microbatches for microbatches, _ in annotated], batch)
        return metrics if self._rank == 0 else None

    def value_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """Train the critic alone, on Monte-Carlo returns (lambda 1, no KL: the policy is its own reference then)."""
        section = replace(self._algorithm.section, lambda_critic=1.0, kl=KlSection())
        valued = [self._critic.annotate(minibatch.microbatches[0]) for minibatch in batch.minibatches]
        annotated, metrics = add_token_advantages(valued, section, self._critic.sum_over_data_parallel)
        metrics |= self._train_critic(annotated, batch)
        return metrics if self._rank == 0 else None

    def sft_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """One supervised step per minibatch. Returns the metrics on rank 0."""
        steps = [self._trainer.sft_minibatch(m.microbatches[0], m.denominators) for m in batch.minibatches]
        return mean_metrics(steps) if self._rank == 0 else None

    def send_weights(self, addresses: Sequence[Address], key: bytes, dtype: str, version: int) -> list[ShardDigest]:
        """Send this rank's boxes to the engine ranks."""
        setup = self._setup
        plan = build_reshard_plan(
            setup.model.family_name,
            setup.model.dims,
            setup.layout,
            setup.engine_layout,
            spec=self._spec,
            trainer_vocab_multiple=setup.model.vocab_multiple,
        )
        return execute_send(
            plan,
            self._rank,
            self._trainer.chunk_parameters(),
            addresses,
            key=key,
            version=version,
            dtype=getattr(torch, dtype),
            bucket_bytes=setup.sync.bucket_bytes,
            timeout_s=setup.sync.timeout_s,
            transport=setup.sync.transport,
        )

    def export_part(self, folder: str) -> None:
        """Write this rank's part of a Hugging Face export; replicas write nothing."""
        setup = self._setup
        write_export_part(
            folder,
            self._trainer.chunk_parameters(),
            setup.model.family,
            setup.model.dims,
            setup.layout,
            self._rank,
            spec=self._spec,
            vocab_multiple=setup.model.vocab_multiple,
        )

    def stop(self) -> None:
        destroy_distributed()

    def _annotated(self, batch: TrainBatch) -> tuple[list[tuple[list[Microbatch], Algorithm]], dict[str, float]]:
        """Each minibatch with what its loss reads and the algorithm that reads it, and metrics of the annotation."""
        algorithm = self._algorithm
        # At the first optimizer step the policy has not moved: its own log-probs are the old ones, a pass is saved.
        first = algorithm if algorithm.has_kl_in_reward else replace(algorithm, needs=algorithm.needs - {"old_logprobs"})
        algorithms = [first] + [algorithm] * (len(batch.minibatches) - 1)
        annotated = [
            self._annotate(minibatch.microbatches[0], algorithm.needs)
            for minibatch, algorithm in zip(batch.minibatches, algorithms, strict=True)
        ]
        metrics: dict[str, float] = {}
        if algorithm.has_token_advantages:
            reduce_sum = self._trainer.sum_over_data_parallel
            annotated, metrics = add_token_advantages(annotated, algorithm.section, reduce_sum)
        return list(zip(annotated, algorithms, strict=True)), metrics

    def _annotate(self, microbatches: Sequence[Microbatch], needs: frozenset[str]) -> list[Microbatch]:
        annotated = self._trainer.annotate(microbatches, needs)
        if "values" in needs:
            annotated = self._critic.annotate(annotated)
        if "ref_logprobs" not in needs:
            return annotated
        with swapped_weights(self._trainer.chunk_parameters(), self._reference):
            scores = self._trainer.compute_logprobs(microbatches)
        return [
            replace(microbatch, token_arrays={**microbatch.token_arrays, "ref_logprobs": logprobs_T})
            for microbatch, logprobs_T in zip(annotated, scores, strict=True)
        ]

    def _build_critic(self, section: CriticSection) -> CriticTrainer:
        setup, trainer = self._setup, self._trainer
        critic = CriticTrainer(
            setup.model.dims,
            setup.dtype,
            replace(setup.section, optimizer=section.optimizer),
            setup.layout,
            trainer.platform,
            seed=setup.seed,
            vocab_multiple=setup.model.vocab_multiple,
        )
        if section.path is not None:
            chunks = import_params(
                FolderSource(section.path),
                value_model_of(setup.model.family),
                setup.model.dims,
                setup.layout,
                self._rank,
                spec=self._spec,
                vocab_multiple=setup.model.vocab_multiple,
                dtype=torch.float32,
            )
            critic.load_parameters(chunks)
        return critic

    def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start value pretraining or the critic's part of RL: as `begin_phase`, for the critic's optimizer."""
        self._critic.begin_phase(section, num_optimizer_steps)

    def _train_critic(self, minibatches: Sequence[Sequence[Microbatch]], batch: TrainBatch) -> dict[str, float]:
        """The critic's optimizer steps on a batch whose values and returns are annotated."""
        critic = self._setup.critic
        assert critic is not None and critic.inner_epochs is not None, "resolve the configuration first"
        num_steps = len(minibatches) // self._setup.section.inner_epochs * critic.inner_epochs
        pairs = islice(cycle(zip(minibatches, batch.minibatches, strict=True)), num_steps)
        return mean_metrics(
            [
                self._critic.train_minibatch(microbatches, part.denominators, self._algorithm.section, critic.value_clip)
                for microbatches, part in pairs
            ]
        )

    @property
    def _spec(self) -> str:
        return "te" if self._trainer.uses_transformer_engine else "local"


@contextmanager
def swapped_weights(live: Sequence[Mapping[str, torch.Tensor]], other: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[None]:
    """The model computes with `other` inside; its own weights come back bit by bit. The optimizer sees nothing of it."""
    own = [{name: tensor.clone() for name, tensor in chunk.items()} for chunk in live]
    try:
        _copy_weights(other, live)
        yield
    finally:
        _copy_weights(own, live)


def _copy_weights(source: Sequence[Mapping[str, torch.Tensor]], target: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for source_chunk, target_chunk in zip(source, target, strict=True):
        for name, tensor in target_chunk.items():
            tensor.copy_(source_chunk[name])


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a training step: means over its optimizer steps; a learning rate is the last one's."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return means | {name: value for name, value in steps[-1].items() if name.endswith("learning_rate")}
