"""What a loss reads and what it returns.

Shape suffixes: _T packed tokens of this rank (token-aligned: index t describes token t), _S sequences of the
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.segments import Segments, identity
from megatron_rl.types.training import Denominators

LOGPROB_FLOOR = -1e4
"""No log-prob below this means anything; -inf is raised to it so that differences stay finite."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed microbatch (or, under context parallelism, this rank's part of it).

    `segment_ids_T` names the sequence of each token, 0 <= id < num_segments; the tokens of a sequence may lie on
    several context-parallel ranks, in any order. `reduce_segments` sums a detached [num_segments, k] tensor over those
    ranks (identity without context parallelism) and is called the same number of times on each of them, for empty
    microbatches too. `old_logprobs_T` may be `policy_logprobs_T.detach()` where the algorithm does not need them.
    `entropy_T` and `policy_logprobs_T` may require grad; nothing else is differentiated. `policy_version` is the
    version being trained, read only by the staleness mask; `is_chosen_T` (`covariance_choice`) only by clip_cov and
    kl_cov.
    """

    policy_logprobs_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    loss_mask_T: Tensor
    segment_ids_T: Tensor
    num_segments: int
    is_correct_S: Tensor
    versions_T: Tensor
    denominators: Denominators
    ref_logprobs_T: Tensor | None = None
    is_chosen_T: Tensor | None = None
    entropy_T: Tensor | None = None
    reduce_segments: Callable[[Tensor], Tensor] = identity
    policy_version: int | None = None

    def build_segments(self) -> Segments:
        """The sequences of this microbatch. Counts their tokens, hence one call of `reduce_segments`."""
        return Segments(self.segment_ids_T, self.loss_mask_T, self.num_segments, self.reduce_segments)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is this microbatch's share of the minibatch loss: a local sum over a *global* denominator.

    Shares add up over microbatches, context- and data-parallel ranks; nothing here knows how many there are. `metrics`
    are detached (sum, weight) pairs: add both over microbatches and ranks, then divide.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def prepare(inputs: LossInputs) -> LossInputs:
    """`inputs` in one floating dtype (fp64 if the policy log-probs are, else fp32), 0 on masked tokens, -inf raised to
    `LOGPROB_FLOOR`.

    Raises TypeError for log-probs in 16 bits: next to 1 a bf16 ratio moves in steps of 0.004 to 0.008, far coarser than
    the GSPO clip of 3e-4 (arXiv 2507.18071). Raises ValueError for a NaN on a trained token or for shapes that
    disagree.
    """
    dtype = torch.float64 if inputs.policy_logprobs_T.dtype == torch.float64 else torch.float32
    mask_T = inputs.loss_mask_T.bool()
    changed: dict[str, Tensor] = {"loss_mask_T": mask_T}
    for item in fields(inputs):
        value = getattr(inputs, item.name)
        if not isinstance(value, Tensor) or not item.name.endswith("_T"):
            continue
        if value.shape != inputs.segment_ids_T.shape:
            raise ValueError(f"{item.name} has shape {tuple(value.shape)}, expected {tuple(inputs.segment_ids_T.shape)}")
        if item.name.endswith("logprobs_T"):
            if value.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{item.name} is {value.dtype}: log-probs must be made in float32 (or float64)")
            changed[item.name] = torch.where(mask_T, value.to(dtype), 0.0).clamp(min=LOGPROB_FLOOR)
        elif item.name in ("advantages_T", "entropy_T"):
            changed[item.name] = torch.where(mask_T, value.to(dtype), 0.0)
    _refuse_nan(changed)
    return replace(inputs, **changed)


def _refuse_nan(tensors: Mapping[str, Tensor]) -> None:
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    is_nan = torch.stack([tensors[name].detach().sum().isnan() for name in names])
    if bool(is_nan.any()):  # the one host-device synchronisation of a loss
        bad = ", ".join(name for name, flag in zip(names, is_nan.tolist(), strict=True) if flag)
        raise ValueError(f"NaN on trained tokens in {bad}: the log-probs or rewards that were handed in are broken")
