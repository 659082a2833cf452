"""One rank of a reference, or teacher, that has ranks of its own: it scores and is never trained.

A plain class that an actor wraps and tests build without Ray. Every method is collective over the ranks of the layout.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.checkpoint.hf_folder import FolderSource, TensorSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.controller.critic_worker import join
from megatron_rl.controller.interfaces import free_address
from megatron_rl.controller.sample_scores import ScoresBySample, scores_by_sample
from megatron_rl.controller.setups import WorkerSetup
from megatron_rl.resharding.channel import Address
from megatron_rl.trainer.parallel import destroy_distributed
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.training import Microbatch, TrainBatch


class ReferenceWorker:
    """`setup.layout` and `setup.model` are the reference's here."""

    def __init__(self, setup: WorkerSetup, rank: int, interface: str = "127.0.0.1") -> None:
        self._setup, self._rank, self._interface = setup, rank, interface
        torch.set_num_threads(setup.section.num_threads)

    def free_address(self) -> Address:
        """This process's interface and a port that is free on it, for rank 0 to listen on."""
        return free_address(self._interface)

    def start(self, address: Address) -> bool:
        """Join the other ranks of the reference at its rank 0's address, build the model and load its first weights.

        Returns whether this model can compute the prompt of a group once (`trainer.shared_prompts`).
        """
        setup = self._setup
        self._model = PolicyTrainer(
            setup.model.dims,
            setup.dtype,
            setup.section,
            setup.layout,
            join(setup, self._rank, address),
            seed=setup.seed,
            temperature=setup.temperature,
            vocab_multiple=setup.model.vocab_multiple,
            is_trained=False,
        )
        self._load(setup.model.source())
        return self._model.shares_prompts

    def load_policy(self, folder: str) -> None:
        """Be the policy that was exported to this folder."""
        self._load(FolderSource(folder))

    def compute_logprobs(self, batch: TrainBatch) -> ScoresBySample:
        """The log-probs of this rank's share, from one rank of each data-parallel position (empty from its replicas).

        Later inner epochs bring the same samples again, so only the first is computed.
        """
        first_epoch = batch.minibatches[: len(batch.minibatches) // self._setup.section.inner_epochs]
        microbatches = [microbatch for minibatch in first_epoch for microbatch in self._scored(minibatch.microbatches[0])]
        return scores_by_sample(microbatches, "ref_logprobs", self._setup.layout, self._rank)

    def stop(self) -> None:
        destroy_distributed()

    def _scored(self, microbatches: tuple[Microbatch, ...]) -> list[Microbatch]:
        scores = self._model.compute_logprobs(microbatches)
        return [
            replace(microbatch, token_arrays={**microbatch.token_arrays, "ref_logprobs": logprobs_T})
            for microbatch, logprobs_T in zip(microbatches, scores, strict=True)
        ]

    def _load(self, source: TensorSource) -> None:
        setup = self._setup
        chunks = import_params(
            source,
            setup.model.family,
            setup.model.dims,
            setup.layout,
            self._rank,
            spec="te" if self._model.uses_transformer_engine else "local",
            vocab_multiple=setup.model.vocab_multiple,
            dtype=torch.float32,
        )
        self._model.load_parameters(chunks)
