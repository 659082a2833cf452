"""From a microbatch and the numbers that a model gives its tokens (log-probs, values) to a loss share.

Shape suffixes: _T packed tokens (token-aligned), _S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import aggregate, token_weights
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.inputs import LossInputs, LossOutput
from megatron_rl.algorithms.losses.value import is_value_clipped, value_loss
from megatron_rl.algorithms.segments import Segments
from megatron_rl.config.algorithm_sections import AlgorithmSection
from megatron_rl.types.training import Denominators, Microbatch

Objective = Callable[..., LossOutput]
"""(microbatch, scores [T] ...) -> this microbatch's share of the minibatch loss. The scores are what the role's head
gives: log-probs and entropies of a policy, values of a critic."""


def policy_objective(algorithm: Algorithm, denominators: Denominators, policy_version: int | None = None) -> Objective:
    """The algorithm's loss. Reads `advantages`, `rollout_logprobs` and what `algorithm.needs` names from token_arrays."""

    def loss(microbatch: Microbatch, logprobs_T: Tensor, entropies_T: Tensor) -> LossOutput:
        return algorithm.loss(loss_inputs(algorithm, microbatch, denominators, policy_version, logprobs_T, entropies_T))

    return loss


def loss_inputs(
    algorithm: Algorithm,
    microbatch: Microbatch,
    denominators: Denominators,
    policy_version: int | None,
    logprobs_T: Tensor,
    entropies_T: Tensor | None = None,
) -> LossInputs:
    """What the algorithm reads of a microbatch, beside the policy's log-probs and on their device.

    Raises ValueError when the microbatch was not annotated with something that `algorithm.needs` names.
    """
    device = logprobs_T.device

    def on_device(array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=device)  # a copy: what comes through shared memory is read-only

    def required(name: str) -> Tensor:
        if name not in microbatch.token_arrays:
            raise ValueError(f"algorithm {algorithm.name}: the microbatch lacks token_arrays[{name!r}]; annotate it first")
        return on_device(microbatch.token_arrays[name])

    lengths_S = np.diff(microbatch.cu_seqlens)
    return LossInputs(
        policy_logprobs_T=logprobs_T,
        old_logprobs_T=required("old_logprobs") if "old_logprobs" in algorithm.needs else logprobs_T.detach(),
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


def value_objective(algorithm: AlgorithmSection, denominators: Denominators, clip: float | None) -> Objective:
    """The clipped value loss, aggregated as the policy's loss is. Reads `values` (before the step) and `returns`."""

    def loss(microbatch: Microbatch, values_T: Tensor) -> LossOutput:
        device = values_T.device
        old_T, returns_T = (torch.tensor(microbatch.token_arrays[name], device=device) for name in ("values", "returns"))
        ids_T = np.repeat(np.arange(microbatch.num_sequences), np.diff(microbatch.cu_seqlens))
        mask_T = torch.tensor(microbatch.loss_mask_T, device=device)
        segments = Segments(torch.tensor(ids_T, device=device), mask_T, microbatch.num_sequences)
        constant = algorithm.aggregation_constant
        weights_T = token_weights(algorithm.aggregation, segments, denominators, constant, values_T.dtype)
        total = aggregate(value_loss(values_T, old_T, returns_T, clip), weights_T)
        count = mask_T.sum()
        is_clipped_T = is_value_clipped(values_T.detach(), old_T, returns_T, clip) & mask_T
        return LossOutput(
            total,
            {
                "loss/value": (total.detach(), count.double() / max(denominators.num_tokens, 1)),
                "loss/value_clip_fraction": (is_clipped_T.sum(), count),
                "critic/value_mean": (torch.where(mask_T, values_T.detach(), 0.0).sum(), count),
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
