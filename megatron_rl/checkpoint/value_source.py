"""A language model's tensors as those of a value model that knows nothing yet."""

from __future__ import annotations

import torch

from megatron_rl.checkpoint.hf_folder import TensorSource
from megatron_rl.model_families.value_model import HEAD
from megatron_rl.types.layout import ShardInterval


class ZeroHeadSource:
    """`source` with a head of zeros, so that every value is 0."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def read(self, name: str, shape: tuple[int, ...], box: ShardInterval) -> torch.Tensor:
        return torch.zeros(box.num_rows, box.num_cols) if name == HEAD else self._source.read(name, shape, box)
