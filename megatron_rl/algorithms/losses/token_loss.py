"""The common shape of a policy objective's result."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLoss(NamedTuple):
    """A loss per token, before aggregation, and what its metrics are made of. All [T]."""

    loss_T: Tensor
    ratio_T: Tensor
    """Detached: the importance ratio that the objective used."""
    is_clipped_T: Tensor
    """bool: tokens whose policy gradient the objective removed (or, for CISPO and AIPO, whose weight it capped)."""
