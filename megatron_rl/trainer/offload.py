"""Giving a trainer rank's device memory to the engine and taking it back: parameters, gradients, optimizer.

What moves is storages, not tensors: every view of them (Megatron's buckets, shards and main gradients) stays the tensor
that it is and is valid again after `onload`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.trainer.optimizer import inner_optimizers


class ParkedState:
    """One state of a rank. Host memory is its own parking place: on a CPU nothing moves and the bytes are still told."""

    def __init__(self, *, keeps_values: bool) -> None:
        """`keeps_values` False: what comes back is zero, and no host memory is taken."""
        self._keeps_values = keeps_values
        self._parked: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self._free: dict[int, list[torch.Tensor]] = {}
        """Page-locked memory is slow to make: what is not in use waits here, by its size."""

    def offload(self, tensors: Iterable[torch.Tensor]) -> int:
        """Free the device memory behind the tensors; how many bytes they lie in."""
        storages = distinct_storages(tensors)
        num_bytes = sum(storage.nbytes() for storage in storages)
        for storage in storages:
            if storage.nbytes() and self._moves(storage):
                self._parked.append((storage, storage.nbytes(), self._copy(storage) if self._keeps_values else None))
                storage.resize_(0)
        return num_bytes

    def onload(self) -> None:
        """Bring back what was offloaded, into new device memory behind the same tensors."""
        for storage, num_bytes, host in self._parked:
            storage.resize_(num_bytes)
            if host is None:
                bytes_of_storage(storage).zero_()
            else:
                bytes_of_storage(storage).copy_(host, non_blocking=True)
                self._free.setdefault(num_bytes, []).append(host)  # overwritten by an `offload`, which waits before
        self._parked.clear()

    def _moves(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type != "cpu"

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        free = self._free.get(storage.nbytes())
        pins = storage.device.type != "cpu"
        host = free.pop() if free else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins)
        return host.copy_(bytes_of_storage(storage))


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind the tensors, each once, in the order in which they come."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def parameters_of(chunks: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """The weights that compute, and what the model keeps beside them."""
    return [tensor.data for chunk in chunks for tensor in (*chunk.module.parameters(), *chunk.module.buffers())]


def gradients_of(chunks: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Megatron's gradient buffers: `main_grad` of every parameter is a view of one."""
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def optimizer_state_of(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    """Adam's moments and the fp32 masters, where they are tensors of their own and not the weights."""
    weights = {storage._cdata for storage in distinct_storages(parameters_of(chunks))}
    tensors = []
    for inner in inner_optimizers(optimizer):
        tensors += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in weights]
