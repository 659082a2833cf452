"""Routed experts as they travel: which experts a model chose for each token in each layer.

Shape suffixes: _T tokens, _Y decoder layers, _K experts per token. Entry t is the choice made while token t was the
input, that is, on the way to the prediction of token t + 1; what nobody knows (the last token, padding, dense layers) is
`unknown_expert`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """What an array of routed experts looks like for one model."""

    num_layers: int
    top_k: int
    num_experts: int
    first_moe_layer: int = 0

    @property
    def dtype(self) -> np.dtype:
        """One byte where it holds all experts and the mark for unknown ones."""
        return np.dtype(np.uint8 if self.num_experts <= 255 else np.uint16)

    def empty(self, num_tokens: int) -> np.ndarray:
        """[T, Y, K], all unknown."""
        return np.full((num_tokens, self.num_layers, self.top_k), unknown_expert(self.dtype), dtype=self.dtype)


def unknown_expert(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)
