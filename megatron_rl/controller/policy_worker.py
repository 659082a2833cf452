"""One trainer rank: a plain class that an actor wraps and tests build without Ray.

Every method is collective over the ranks of a layout: the group calls it on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megatron_rl.algorithms.algorithm import build_algorithm
from megatron_rl.checkpoint.hf_export import write_export_part
from megatron_rl.checkpoint.hf_folder import FolderSource, TensorSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.reference import Reference
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.platforms.platform import select_platform
from megatron_rl.resharding.execute import Address, execute_send
from megatron_rl.resharding.ownership import check_held
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.trainer.choice import annotate_choice
from megatron_rl.trainer.parallel import destroy_distributed, init_distributed, init_model_parallel
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.resharding import ShardDigest, SourceParam
from megatron_rl.types.training import Microbatch, TrainBatch


class PolicyWorker:
    """One rank of the policy."""

    def __init__(self, setup: WorkerSetup, rank: int, interface: str = "127.0.0.1") -> None:
        self._setup, self._rank, self._interface = setup, rank, interface
        self._algorithm = build_algorithm(setup.algorithm)
        self._reference: Reference | None = None
        torch.set_num_threads(setup.section.num_threads)

    def free_address(self) -> Address:
        """This process's interface and a port that is free on it, for rank 0 to listen on."""
        return free_address(self._interface)

    def start(self, address: Address) -> bool:
        """Join the others at rank 0's address, build the model and load its first weights.

        Returns whether this model can compute the prompt of a group once (`trainer.shared_prompts`).
        """
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
            replays_routing=setup.algorithm.router_replay != "off",
        )
        self._trainer.load_parameters(self._import(setup.model.source()))
        return self._trainer.shares_prompts

    def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        """Start the warm start or RL: a schedule of its own and fresh Adam moments. The reference, where the algorithm
        has one, is the policy at the beginning of the last phase.
        """
        self._trainer.begin_phase(section, num_optimizer_steps)
        if "ref_logprobs" in self._algorithm.needs:
            if self._reference is None:
                self._reference = self._build_reference(self._algorithm.section.reference)
            self._reference.begin_phase(self._trainer.chunk_parameters())

    def train_step(self, batch: TrainBatch, version: int) -> dict[str, float] | None:
        """Annotate, then one optimizer step per minibatch. `batch` holds this rank's data-parallel share only; `version`
        is the policy being trained.

        Returns the metrics, averaged over the minibatches, on rank 0 and None elsewhere.
        """
        # At the first optimizer step the policy has not moved: its own log-probs are the old ones, a pass is saved.
        first = self._algorithm
        if "chosen" not in first.needs:
            first = replace(first, needs=first.needs - {"old_logprobs"})
        algorithms = [first] + [self._algorithm] * (len(batch.minibatches) - 1)
        annotated = [
            self._annotate(minibatch.microbatches[0], algorithm.needs)
            for minibatch, algorithm in zip(batch.minibatches, algorithms, strict=True)
        ]
        steps = [
            self._trainer.train_minibatch(microbatches, minibatch.denominators, algorithm, policy_version=version)
            for microbatches, minibatch, algorithm in zip(annotated, batch.minibatches, algorithms, strict=True)
        ]
        if self._reference is not None:
            self._reference.end_step(self._trainer.chunk_parameters())
        return mean_metrics(steps) if self._rank == 0 else None

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
        chunks = self._trainer.chunk_parameters()
        held = {SourceParam(n, name): tuple(p.shape) for n, chunk in enumerate(chunks) for name, p in chunk.items()}
        check_held(setup.model.family, plan.key, self._rank, held)
        return execute_send(
            plan,
            self._rank,
            chunks,
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

    def _annotate(self, microbatches: Sequence[Microbatch], needs: frozenset[str]) -> list[Microbatch]:
        annotated = self._trainer.annotate(microbatches, needs)
        if "chosen" in needs:
            annotated = annotate_choice(annotated, self._algorithm.section, self._setup.seed)
        if "ref_logprobs" not in needs:
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


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a training step: means over its optimizer steps; the learning rate is the last one's."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return means | {"learning_rate": steps[-1]["learning_rate"]}
