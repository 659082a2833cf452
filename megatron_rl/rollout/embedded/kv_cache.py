"""Keys and values of the running sequences, one slot each.

Shape suffixes: S slots, C context, K key-value heads of all ranks, D head dim, N running sequences, L length.
"""

from __future__ import annotations

import torch

from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.rollout.embedded.weights import local_kv_heads


class KVCache:
    """A preallocated pool. Running sequences hold the slots 0..N-1, so that reading them is a view and never a gather.

    Unwritten entries must be finite, because masked attention still multiplies them by zero: hence zeros, not empty.
    """

    def __init__(
        self, dims: ModelDims, tp: int, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_heads = tp * local_kv_heads(dims, tp)
        self._shape = (2, dims.num_layers, num_slots, max_context, num_heads, dims.head_dim)
        self._dtype, self._device = dtype, device
        self.resume()

    def resume(self) -> None:
        """Memory, at the start and after a `release`: zeros."""
        self.data = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self._rows = self.data.flatten(2, 3)  # a token is one row

    def write_prompts(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill positions 0..L-1 of `slots` [M] with keys and values [M, L, K, D]."""
        length = keys.shape[1]
        self.data[0, layer, :, :length].index_copy_(0, slots, keys)
        self.data[1, layer, :, :length].index_copy_(0, slots, values)

    def write_tokens(self, layer: int, rows_N: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one token per sequence, [N, K, D]; `rows_N` is slot * C + position."""
        self._rows[0, layer].index_copy_(0, rows_N, keys)
        self._rows[1, layer].index_copy_(0, rows_N, values)

    def read(self, layer: int, num_sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [N, K, L, D] of the first `length` keys and values of the running sequences."""
        keys, values = self.data[:, layer, :num_sequences, :length].transpose(2, 3).unbind(0)
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, :, target, :length] = self.data[:, :, source, :length]

    def clear(self) -> None:
        self.data.zero_()

    def release(self) -> None:
        """Give the memory up. Nothing may be written or read until `resume`."""
        self.data = self._rows = self.data.new_empty(0)
