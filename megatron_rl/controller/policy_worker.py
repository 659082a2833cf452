"""One trainer rank, of the policy and of what takes turns with it: a plain class that tests build without Ray.

Every method is collective over the ranks of a layout: the group calls it on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.batching.build import build_microbatch
from megatron_rl.checkpoint.hf_export import write_export_part
from megatron_rl.checkpoint.hf_folder import FolderSource, TensorSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.config.sections import OptimizerSection, SyncSection
from megatron_rl.controller.critic_worker import CriticPart, join, mean_metrics
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.reference import Reference
from megatron_rl.controller.sample_scores import ScoresBySample, with_scores
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.platforms.host_heap import HostHeap
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.channel import Address
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.ownership import check_held
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.trainer.choice import annotate_choice
from megatron_rl.trainer.parallel import destroy_distributed
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.rejection import drop_rejected
from megatron_rl.trainer.token_advantages import add_token_advantages
from megatron_rl.types.resharding import ShardDigest, SourceParam, SyncOrder
from megatron_rl.types.training import Denominators, Microbatch, TrainBatch, TrainSample


class PolicyWorker:
    """One rank of the policy and, where the algorithm has them, of its reference and its critic."""

    def __init__(self, setup: WorkerSetup, rank: int, interface: str = "127.0.0.1") -> None:
        self._setup, self._rank, self._interface = setup, rank, interface
        self._algorithm = build_algorithm(setup.algorithm)
        # At the first optimizer step the policy has not moved: its own log-probs are the old ones, a pass is saved.
        self._first = self._algorithm
        if not self._algorithm.has_kl_in_reward and not {"chosen", "remaining"} & self._algorithm.needs:
            self._first = replace(self._algorithm, needs=self._algorithm.needs - {"old_logprobs"})
        self._sender: WeightSender | None = None
        self._reference: Reference | None = None
        self._heap = HostHeap()
        torch.set_num_threads(setup.section.num_threads)

    def free_address(self) -> Address:
        """This process's interface and a port that is free on it, for rank 0 to listen on."""
        return free_address(self._interface)

    def start(self, address: Address) -> bool:
        """Join the others at rank 0's address, build the model and load its first weights.

        Returns whether this model can compute the prompt of a group once (`trainer.shared_prompts`).
        """
        setup = self._setup
        platform = join(setup, self._rank, address)
        self._trainer = PolicyTrainer(
            setup.model.dims,
            setup.dtype,
            setup.section,
            setup.layout,
            platform,
            seed=setup.seed,
            temperature=setup.temperature,
            vocab_multiple=setup.model.vocab_multiple,
            replays_routing=setup.algorithm.router_replay != "off",
        )
        self._trainer.load_parameters(self._import(setup.model.source()))
        self._critic = CriticPart(setup, self._rank, platform) if setup.critic is not None else None
        return self._trainer.shares_prompts

    def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start the warm start or RL: a schedule of its own and fresh Adam moments. The reference, where the algorithm
        has one, is the policy at the beginning of the last phase, and so is a critic that has no folder of its own.
        """
        self._trainer.begin_phase(section, num_optimizer_steps)
        if self._critic is not None and not self._critic.has_own_start:
            self._critic.trainer.load_policy(self._trainer.chunk_parameters())
        reference = self._algorithm.section.reference
        if "ref_logprobs" in self._algorithm.needs and reference.layout is None:
            if self._reference is None:
                self._reference = self._build_reference(reference)
            self._reference.begin_phase(self._trainer.chunk_parameters())

    def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start value pretraining or the critic's part of RL: as `begin_phase`, for the critic's optimizer."""
        assert self._critic is not None, "the critic has ranks of its own"
        self._critic.trainer.begin_phase(section, num_optimizer_steps)

    def train_step(
        self, batch: TrainBatch, version: int, others: Mapping[str, ScoresBySample] | None = None
    ) -> dict[str, float] | None:
        """Annotate, then one optimizer step per minibatch. `batch` holds this rank's data-parallel share only; `version`
        is the policy being trained; `others` are token arrays by name that models on ranks of their own made: `values`
        of a critic, `ref_logprobs` of a reference.

        Returns the metrics, averaged over the minibatches, on rank 0 and None elsewhere.
        """
        annotated, metrics = self._annotated(batch, others or {})
        steps = [
            self._policy_step(microbatches, minibatch.denominators, version, is_first=number == 0)
            for number, (microbatches, minibatch) in enumerate(zip(annotated, batch.minibatches, strict=True))
        ]
        metrics |= mean_metrics(steps)
        if self._critic is not None:
            metrics |= self._critic.train(annotated, batch)
        if self._reference is not None:
            self._reference.end_step(self._trainer.chunk_parameters())
        self._heap.trim()
        return metrics if self._rank == 0 else None

    def value_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """Value pretraining: train the critic alone. Metrics on rank 0."""
        assert self._critic is not None, "the critic has ranks of its own"
        metrics = self._critic.pretrain(batch)
        return metrics if self._rank == 0 else None

    def sft_step(self, batch: TrainBatch) -> dict[str, float] | None:
        """One supervised step per minibatch. Returns the metrics on rank 0."""
        steps = [self._trainer.sft_minibatch(m.microbatches[0], m.denominators) for m in batch.minibatches]
        return mean_metrics(steps) if self._rank == 0 else None

    def send_weights(self, order: SyncOrder, key: bytes) -> list[ShardDigest]:
        """Send this rank's boxes to the engine ranks."""
        setup = self._setup
        plan = build_reshard_plan(
            setup.model.family_name,
            setup.model.dims,
            setup.layout,
            setup.engine_layout,
            spec=self._spec,
            trainer_vocab_multiple=setup.model.vocab_multiple,
            relay=setup.sync.relay,
        )
        chunks = self._trainer.chunk_parameters()
        held = {SourceParam(n, name): tuple(p.shape) for n, chunk in enumerate(chunks) for name, p in chunk.items()}
        check_held(setup.model.family, plan.key, self._rank, held)
        if self._sender is None or self._sender.plan is not plan or self._sender.addresses != order.addresses:
            self._close_sender()
            self._sender = WeightSender(plan, self._rank, order.addresses, key, send_options(setup.sync))
        return self._sender.send(chunks, order)

    def score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-prob (float32, temperature 1) of each token given those before it; 0 for the first."""
        samples = [scored_sample(number, ids) for number, ids in enumerate(token_ids)]
        batch = [build_microbatch(samples, range(len(samples)))]
        if self._setup.layout.virtual_pp > 1:  # an interleaved pipeline takes a multiple of its stages
            batch += [build_microbatch([], [])] * (self._setup.layout.pp - 1)
        trainer = self._trainer
        sampling_temperature, trainer.temperature = trainer.temperature, 1.0
        try:
            packed_T = trainer.compute_logprobs(batch)[0]
        finally:
            trainer.temperature = sampling_temperature
        return np.split(packed_T, np.cumsum([len(ids) for ids in token_ids])[:-1])

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

    def offload(self, states: Sequence[str]) -> dict[str, int]:
        """Give the device memory of these states up, the critic's too; the bytes of each."""
        num_bytes = self._trainer.offload(states)
        if self._critic is not None:
            num_bytes = {state: n + num_bytes[state] for state, n in self._critic.trainer.offload(states).items()}
        return num_bytes

    def onload(self, states: Sequence[str]) -> None:
        """Take back what `offload` gave up."""
        self._trainer.onload(states)
        if self._critic is not None:
            self._critic.trainer.onload(states)

    def visible_gpus(self) -> str | None:
        """What CUDA_VISIBLE_DEVICES names here: the GPU that Ray gave this rank."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def stop(self) -> None:
        self._close_sender()
        destroy_distributed()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _annotated(
        self, batch: TrainBatch, others: Mapping[str, ScoresBySample]
    ) -> tuple[list[list[Microbatch]], dict[str, float]]:
        """Each minibatch with what its loss reads, and metrics of the annotation."""
        annotated = [
            self._annotate(minibatch.microbatches[0], (self._algorithm if number else self._first).needs, others)
            for number, minibatch in enumerate(batch.minibatches)
        ]
        if not self._algorithm.has_token_advantages:
            return annotated, {}
        return add_token_advantages(annotated, self._algorithm.section, self._trainer.sum_over_data_parallel)

    def _policy_step(
        self, microbatches: list[Microbatch], denominators: Denominators, version: int, *, is_first: bool
    ) -> dict[str, float]:
        """One optimizer step of the policy on an annotated minibatch; its metrics."""
        algorithm = self._first if is_first else self._algorithm
        metrics: dict[str, float] = {}
        if "remaining" in algorithm.needs:
            reduce_sum = self._trainer.sum_over_data_parallel
            microbatches, denominators, metrics = drop_rejected(microbatches, denominators, algorithm, version, reduce_sum)
        if "chosen" in algorithm.needs:
            microbatches = annotate_choice(microbatches, algorithm.section, self._setup.seed)
        return metrics | self._trainer.train_minibatch(microbatches, denominators, algorithm, policy_version=version)

    def _annotate(
        self, microbatches: Sequence[Microbatch], needs: frozenset[str], others: Mapping[str, ScoresBySample]
    ) -> list[Microbatch]:
        annotated = self._trainer.annotate(microbatches, needs)
        if self._critic is not None:
            annotated = self._critic.trainer.annotate(annotated)
        for name, by_sample in others.items():
            annotated = [with_scores(microbatch, name, by_sample) for microbatch in annotated]
        if "ref_logprobs" not in needs or "ref_logprobs" in others:
            return annotated
        own_choice = [replace(microbatch, experts_TYK=None) for microbatch in microbatches]  # routing is the policy's
        assert self._reference is not None, "begin_phase comes first"
        with self._reference.swapped_into(self._trainer.chunk_parameters()):
            scores = self._trainer.compute_logprobs(own_choice)
        return [
            replace(microbatch, token_arrays={**microbatch.token_arrays, "ref_logprobs": logprobs_T})
            for microbatch, logprobs_T in zip(annotated, scores, strict=True)
        ]

    def _build_reference(self, section: ReferenceSection) -> Reference:
        path = section.path
        return Reference(section, None if path is None else lambda: self._import(FolderSource(path)))

    def _import(self, source: TensorSource) -> list[dict[str, torch.Tensor]]:
        """Whole tensors -> this rank's shards, by Megatron's local names."""
        setup = self._setup
        return import_params(
            source,
            setup.model.family,
            setup.model.dims,
            setup.layout,
            self._rank,
            spec=self._spec,
            vocab_multiple=setup.model.vocab_multiple,
            dtype=torch.float32,
        )

    @property
    def _spec(self) -> str:
        return "te" if self._trainer.uses_transformer_engine else "local"


def send_options(section: SyncSection) -> SendOptions:
    return SendOptions(
        bucket_bytes=section.bucket_bytes,
        timeout_s=section.timeout_s,
        transport=section.transport,
        directory=None if section.directory is None else Path(section.directory),
        full_interval=section.full_sync_interval,
    )


def scored_sample(number: int, token_ids: Sequence[int]) -> TrainSample:
    """A sequence of which every token but the first is scored."""
    length = len(token_ids)
    return TrainSample(
        sample_id=str(number), group_id=str(number), token_ids_L=np.array(token_ids, dtype=np.int64),
        loss_mask_L=np.arange(length) > 0, rollout_logprobs_L=np.zeros(length, np.float32),
        versions_L=np.zeros(length, np.int32), reward=0.0, advantage=0.0, is_correct=False, is_truncated=False,
    )  # fmt: skip
