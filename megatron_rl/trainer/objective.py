"""From a microbatch and the log-probs that the model gives its tokens to a loss share.

Shape suffixes: _T packed tokens (token-aligned), _S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.inputs import LossInputs, LossOutput
from megatron_rl.types.training import Denominators, Microbatch

Objective = Callable[[Microbatch, Tensor, Tensor], LossOutput]
"""(microbatch, policy log-probs [T], entropies [T]) -> this microbatch's share of the minibatch loss."""


def policy_objective(algorithm: Algorithm, denominators: Denominators, policy_version: int | None = None) -> Objective:
    """The algorithm's loss. Reads `advantages`, `rollout_logprobs` and what `algorithm.needs` names from token_arrays."""

    def loss(microbatch: Microbatch, logprobs_T: Tensor, entropies_T: Tensor) -> LossOutput:
        device = logprobs_T.device

        def on_device(array: np.ndarray) -> Tensor:
            return torch.tensor(array, device=device)  # a copy: what comes through shared memory is read-only

        def required(name: str) -> Tensor:
            if name not in microbatch.token_arrays:
                raise ValueError(f"algorithm {algorithm.name}: the microbatch lacks token_arrays[{name!r}]; annotate it first")
            return on_device(microbatch.token_arrays[name])

        lengths_S = np.diff(microbatch.cu_seqlens)
        old_T = required("old_logprobs") if "old_logprobs" in algorithm.needs else logprobs_T.detach()
        return algorithm.loss(
            LossInputs(
                policy_logprobs_T=logprobs_T,
                old_logprobs_T=old_T,
                rollout_logprobs_T=required("rollout_logprobs"),
                advantages_T=required("advantages"),
                loss_mask_T=on_device(microbatch.loss_mask_T),
                segment_ids_T=on_device(np.repeat(np.arange(microbatch.num_sequences), lengths_S)),
                num_segments=microbatch.num_sequences,
                is_correct_S=on_device(microbatch.is_correct_S),
                versions_T=on_device(microbatch.versions_T),
                denominators=denominators,
                ref_logprobs_T=required("ref_logprobs") if "ref_logprobs" in algorithm.needs else None,
                is_chosen_T=required("chosen") if "chosen" in algorithm.needs else None,
                entropy_T=entropies_T,
                policy_version=policy_version,
            )
        )

    return loss


def supervised_objective(denominators: Denominators) -> Objective:
    """Mean negative log-likelihood over the loss mask of the whole minibatch."""
    num_tokens = max(denominators.num_tokens, 1)

    def loss(microbatch: Microbatch, logprobs_T: Tensor, entropies_T: Tensor) -> LossOutput:
        mask_T = torch.tensor(microbatch.loss_mask_T, device=logprobs_T.device)
        negative_sum = -(logprobs_T * mask_T).sum()
        count = mask_T.sum()
        return LossOutput(
            negative_sum / num_tokens,
            {
                "loss/supervised": (negative_sum.detach(), count),
                "loss/entropy": ((entropies_T.detach() * mask_T).sum(), count),
            },
        )

    return loss


def sum_metrics(parts: list[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    """(sum, weight) pairs added over microbatches, each as a float64 tensor [2]."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, pair in part.items():
            value = torch.stack([torch.as_tensor(item).detach().double() for item in pair])
            totals[name] = totals[name] + value if name in totals else value
    return totals
