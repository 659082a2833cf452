"""Sequence statistics over packed tokens: sums per segment, in fp64, detached, complete under context parallelism.

Shape suffixes: _T packed tokens, _S sequences (segments) of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def identity(statistics_Sk: Tensor) -> Tensor:
    """The reduction over context-parallel ranks when there is only one."""
    return statistics_Sk


@dataclass(frozen=True, slots=True)
class Segments:
    """Which token belongs to which sequence, and which tokens count.

    Statistics are constants to autograd: objectives whose sequence value carries gradient are written in the
    stop-gradient form, so that no gradient has to cross ranks.
    """

    ids_T: Tensor  # int64
    mask_T: Tensor  # bool
    num: int
    reduce: Callable[[Tensor], Tensor] = identity
    counts_S: Tensor = field(init=False)
    """Unmasked tokens per sequence, fp64. Counted on construction, which is therefore a call of `reduce`."""

    def __post_init__(self) -> None:
        counts_S = self._sums(self.mask_T.to(torch.float64).unsqueeze(1)).squeeze(1)
        object.__setattr__(self, "counts_S", counts_S)

    def sums(self, *values_T: Tensor) -> tuple[Tensor, ...]:
        """Per sequence, the sum of each argument over its unmasked tokens; fp64 [S] each, one reduction for all."""
        columns = [torch.where(self.mask_T, value.detach().to(torch.float64), 0.0) for value in values_T]
        return self._sums(torch.stack(columns, dim=1)).unbind(dim=1)

    def means(self, *values_T: Tensor) -> tuple[Tensor, ...]:
        """As `sums`, divided by the number of unmasked tokens; 0 where there is none."""
        return tuple(total_S / self.counts_S.clamp(min=1.0) for total_S in self.sums(*values_T))

    def spread(self, values_S: Tensor) -> Tensor:
        """[S] -> [T]: every token gets the value of its sequence."""
        return values_S[self.ids_T]

    def _sums(self, columns_Tk: Tensor) -> Tensor:
        local_Sk = columns_Tk.new_zeros(self.num, columns_Tk.shape[1]).index_add_(0, self.ids_T, columns_Tk)
        return self.reduce(local_Sk)
