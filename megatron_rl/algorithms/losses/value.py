"""The critic's loss. Shape suffix: _T packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None = 0.5) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), [T] (PPO2's value clipping; None: off).

    c is 0.5 in verl and 0.2 in slime. Aggregate with `token_weights`, like every other loss.
    """
    loss_T = (values_T - returns_T) ** 2
    if clip is not None:
        clipped_T = torch.minimum(torch.maximum(values_T, old_values_T - clip), old_values_T + clip)
        loss_T = torch.maximum(loss_T, (clipped_T - returns_T) ** 2)
    return 0.5 * loss_T


def is_value_clipped(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None = 0.5) -> Tensor:
    """Where the clipped error is the larger one and counts (its gradient is 0), bool [T]."""
    if clip is None:
        return torch.zeros_like(values_T, dtype=torch.bool)
    clipped_T = torch.minimum(torch.maximum(values_T, old_values_T - clip), old_values_T + clip)
    return (clipped_T - returns_T) ** 2 > (values_T - returns_T) ** 2
