"""Between GPUs over NCCL: the boxes of a bucket are joined on the sending GPU, travel from staging memory to staging memory,
and are laid into the parameters there. Two buckets on either side: one travels while the other is filled, hashed or laid out.

The channel carries the id of the pair's communicator, which is kept from sync to sync, and says when the peer is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from megatron_rl.resharding.box_memory import bytes_of, hash_boxes, unpack
from megatron_rl.resharding.boxes import Box, Boxes, pieces, total_bytes
from megatron_rl.resharding.channel import Channel, ChannelError
from megatron_rl.resharding.cuda_ipc import StagingBuffers
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.nccl import Communicator, new_unique_id
from megatron_rl.resharding.transports.protocol import overlapped
from megatron_rl.resharding.transports.queued import QueuedTransport

_SENDER, _RECEIVER = 0, 1
_POLL_S = 5e-5
"""A bucket of 64 MB takes some 1.5 ms at 400 Gb/s."""


class NcclTransport(QueuedTransport):
    """See `Transport`. Both ends hold two buckets on their `device` while it runs, and the communicator until `close`. Boxes
    that are received may lie in host memory beside it (`sync.staging: host`)."""

    def __init__(self, channel: Channel, bucket_bytes: int, device: torch.device) -> None:
        super().__init__(channel, bucket_bytes)
        self._device = device
        self._pair: Communicator | None = None

    def close(self) -> None:
        super().close()
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.abort()

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        buckets, staging = self._buckets(boxes)
        if self._pair is None:
            unique_id = new_unique_id()
            self._channel.ask({"kind": "nccl", "bucket_bytes": self._bucket_bytes, "id": unique_id.hex()})
            pair = self._meet(unique_id, _SENDER)
        else:
            self._channel.ask({"kind": "nccl", "bucket_bytes": self._bucket_bytes, "id": None})
            pair = self._pair

        def fill(number: int, bucket: Boxes) -> torch.Tensor:
            parts = [box.view.to(box.dtype).reshape(-1).view(torch.uint8) for box in bucket]
            values = staging.fill(number, parts)
            digest.update(bytes_of(values.cpu()))
            return values

        def send(number: int, bucket: Boxes, values: torch.Tensor) -> None:
            pair.send(values, _RECEIVER)
            self._finish(pair)

        overlapped(buckets, fill, send)

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, _ = self._channel.receive()
        if header["bucket_bytes"] != self._bucket_bytes or (header["id"] is None) != (self._pair is not None):
            raise ValueError(f"buckets of {header['bucket_bytes']} bytes for {self._bucket_bytes} here, or another NCCL pair")
        self._channel.send({"ok": True})
        buckets, staging = self._buckets(boxes)
        pair = self._pair or self._meet(bytes.fromhex(header["id"]), _RECEIVER)

        def receive(number: int, bucket: Boxes) -> torch.Tensor:
            values = staging.part(number, total_bytes(bucket))
            pair.receive(values, _SENDER)
            self._finish(pair)
            return values

        def settle(number: int, bucket: Boxes, values: torch.Tensor) -> None:
            unpack(values, bucket)
            hash_boxes(bucket, digest)  # behind what was laid out: the staging memory is free then

        overlapped(buckets, receive, settle)

    def _buckets(self, boxes: Sequence[Box]) -> tuple[list[Boxes], StagingBuffers]:
        buckets = list(pieces(boxes, self._bucket_bytes))
        return buckets, StagingBuffers(self._device, max(map(total_bytes, buckets)))

    def _meet(self, unique_id: bytes, rank: int) -> Communicator:
        pair = self._pair = Communicator(unique_id, rank, 2, self._device)
        self._wait(pair.is_ready)
        return pair

    def _finish(self, pair: Communicator) -> None:
        self._wait(pair.is_ready)
        self._wait(pair.is_idle)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Raises ChannelError when the peer goes away instead, with its own line if it left one, or after the timeout."""
        channel = self._channel
        deadline = time.monotonic() + channel.timeout_s
        while not is_done():
            if channel.is_ended():
                channel.expect()
                raise ChannelError(f"{channel.peer}: closed the connection")
            if time.monotonic() > deadline:
                raise ChannelError(f"{channel.peer}: nothing moved within {channel.timeout_s:.0f} s")
            time.sleep(_POLL_S)
