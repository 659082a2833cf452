"""The policy as one trainer rank sees it: log-probs and train steps on top of what every role does. No Ray here.

Shape suffixes: _T packed tokens (token-aligned), _K scored rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.config.sections import TrainerSection
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.platforms.platform import Platform
from megatron_rl.trainer.logprobs import compute_chunked_logprobs
from megatron_rl.trainer.model import PolicyModel
from megatron_rl.trainer.objective import policy_objective, supervised_objective
from megatron_rl.trainer.role import MegatronRole
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import Denominators, Microbatch


class PolicyTrainer(MegatronRole):
    """One rank of the policy. `temperature` is the sampling temperature, by which logits are divided.

    With `replays_routing`, MoE layers visit the experts that a microbatch brings.
    """

    model_class = PolicyModel
    is_head_split = True

    def __init__(
        self,
        dims: ModelDims,
        dtype: str,
        trainer: TrainerSection,
        layout: ParallelLayout,
        platform: Platform,
        *,
        seed: int,
        temperature: float = 1.0,
        vocab_multiple: int = 1,
        num_optimizer_steps: int = 1,
        replays_routing: bool = False,
        is_trained: bool = True,
    ) -> None:
        super().__init__(
            dims, dtype, trainer, layout, platform,
            seed=seed, vocab_multiple=vocab_multiple, num_optimizer_steps=num_optimizer_steps,
            replays_routing=replays_routing, is_trained=is_trained,
        )  # fmt: skip
        self.temperature = temperature

    def compute_logprobs(
        self,
        microbatches: Sequence[Microbatch],
        *,
        score_all: bool = False,
        experts_out: list[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Token-aligned float32 log-probs [T] of each microbatch of this data-parallel rank, returned on all its ranks.

        0 outside the loss mask, or only on first tokens with `score_all`. `experts_out`: see `compute_scores`.
        """
        return self.compute_scores(microbatches, score_all=score_all, experts_out=experts_out)

    def annotate(self, microbatches: Sequence[Microbatch], needs: frozenset[str]) -> list[Microbatch]:
        """The microbatches with `old_logprobs` in their token_arrays if `needs` names them, and with the experts that this
        pass chose if it names `routing` too (R2)."""
        if "old_logprobs" not in needs:
            return list(microbatches)
        experts: list[np.ndarray] | None = [] if "routing" in needs else None
        scores = self.compute_logprobs(microbatches, experts_out=experts)
        return [
            replace(
                microbatch,
                token_arrays={**microbatch.token_arrays, "old_logprobs": logprobs_T},
                experts_TYK=microbatch.experts_TYK if experts is None else experts[number],
            )
            for number, (microbatch, logprobs_T) in enumerate(zip(microbatches, scores, strict=True))
        ]

    def train_minibatch(
        self,
        microbatches: Sequence[Microbatch],
        denominators: Denominators,
        algorithm: Algorithm,
        *,
        policy_version: int | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the algorithm's loss. Returns the same metrics on every rank.

        All data-parallel ranks bring equally many microbatches. Raises FloatingPointError, on every rank, when the
        gradient norm is not finite; weights and moments are those of before the step then.
        """
        return self._optimize(microbatches, policy_objective(algorithm, denominators, policy_version))

    def sft_minibatch(self, microbatches: Sequence[Microbatch], denominators: Denominators) -> dict[str, float]:
        """One optimizer step on the negative log-likelihood of the loss mask. As `train_minibatch` otherwise."""
        return self._optimize(microbatches, supervised_objective(denominators))

    def _score_rows(self, model: Any, hidden_KH: Tensor, target_ids_K: Tensor) -> Tensor:
        """Log-probs and entropies, [K, 2]."""
        pair = compute_chunked_logprobs(
            hidden_KH,
            model.output_weight(),
            target_ids_K,
            temperature=self.temperature,
            vocab_size=self.dims.vocab_size,
            chunk_tokens=self.trainer.logprob_chunk_tokens,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        return torch.stack(pair, dim=1)
