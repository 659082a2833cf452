"""Weight slices between two processes on one GPU: the sender packs them into staging memory that the receiver maps.

CUDA IPC handles travel as JSON over the authenticated channel (torch's own way pickles them). Each buffer is shared
once and mapped once, as torch's reference counter across processes wants it; the receiver unmaps before the sender
frees.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.resharding.transports.protocol import NUM_BUFFERS

_FIELDS = (
    "device", "handle", "size_bytes", "offset_bytes",
    "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""What `UntypedStorage._share_cuda_` returns and `_new_shared_cuda` takes, in this order (torch 2.11 to 2.14)."""
_BYTES = ("handle", "ref_counter_handle", "event_handle")


class StagingBuffers:
    """`NUM_BUFFERS` buffers of `num_bytes` on `device`, used in turn. A sender keeps it until the receiver has unmapped them.

    Raises ValueError when `device` is no GPU.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        if device.type != "cuda":
            raise ValueError(f"the trainer's weights are on {device}, not on a GPU; buckets are staged there")
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]

    def describe(self) -> dict[str, Any]:
        """What `MappedBuffers` opens, JSON-serialisable. Call it once: each call is one promise to be opened."""
        return {
            "gpu": gpu_uuid(self._buffers[0].device),
            "handles": [encode_handle(share_storage(buffer.untyped_storage())) for buffer in self._buffers],
        }

    def part(self, number: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of the buffer whose turn it is."""
        return self._buffers[number % NUM_BUFFERS][:num_bytes]

    def fill(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay flat bytes one after another into the buffer whose turn it is, and wait until they stand there."""
        values = self.part(number, sum(part.numel() for part in parts))
        torch.cat(list(parts), out=values)
        torch.cuda.current_stream(values.device).synchronize()
        return values


class MappedBuffers:
    """The receiver's end of `StagingBuffers.describe()`. Raises ValueError when this process does not see that GPU."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        device = local_device(description["gpu"])
        self._buffers = []
        for handle in description["handles"]:
            storage = open_storage({**decode_handle(handle), "device": device.index})
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))  # type: ignore[call-overload]

    def read(self, number: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a buffer, where they are. Raises ValueError outside of it."""
        mapped = self._buffers
        if not (0 <= number < len(mapped) and 0 <= num_bytes <= mapped[number].numel()):
            raise ValueError(f"buffer {number} with {num_bytes} bytes is outside the {len(mapped)} mapped buffers")
        return self._buffers[number][:num_bytes]

    def finish_reading(self) -> None:
        """Wait until everything read so far has been used: the sender overwrites it next."""
        torch.cuda.current_stream(self._buffers[0].device).synchronize()

    def close(self) -> None:
        """Unmap."""
        self._buffers.clear()


def encode_handle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The handle's bytes as base64, so that JSON can carry it."""
    return {**fields, **{name: base64.b64encode(fields[name]).decode() for name in _BYTES}}


def decode_handle(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_handle`. Raises ValueError naming a field that is missing or unknown."""
    if odd := sorted(set(_FIELDS) ^ set(encoded)):
        raise ValueError(f"CUDA IPC handle: field '{odd[0]}' is on one side only; do both run the same torch series?")
    return {**encoded, **{name: base64.b64decode(encoded[name], validate=True) for name in _BYTES}}


def share_storage(storage: torch.UntypedStorage) -> dict[str, Any]:
    return dict(zip(_FIELDS, storage._share_cuda_(), strict=True))


def open_storage(fields: Mapping[str, Any]) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_cuda(*(fields[name] for name in _FIELDS))


def gpu_uuid(device: torch.device) -> str:
    """The GPU's own name: processes that see different devices number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def local_device(uuid: str) -> torch.device:
    """The device of that GPU in this process."""
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise ValueError(f"GPU {uuid} of the trainer is not visible to the engine; set sync.transport=p2p")
