"""Point to point over the pair's own authenticated connection: one message per pair, from parameters into parameters.

Boxes that lie in host memory in the dtype that travels are handed to the kernel where they are, row by row where they are
strided (gather and scatter lists): no copy on either side. The others (cast, on a GPU, of short rows) pass through two host
buffers of a bucket each. Packing and hashing of one bucket overlap with the sending of the one before, hashing with the
receiving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.resharding.box_memory import bytes_of, hash_boxes, pack, span_of, spans_of, unpack
from megatron_rl.resharding.boxes import Box, Boxes, pieces, total_bytes
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.transports.protocol import NUM_BUFFERS, overlapped
from megatron_rl.resharding.transports.queued import QueuedTransport

_SHORT_ROW_BYTES = 128
"""A strided box with rows below this is packed: a span costs the kernel as much as copying about that."""


class P2pTransport(QueuedTransport):
    """See `Transport`. Holds at most two buckets of `bucket_bytes` beside the parameters."""

    def __init__(self, channel: Channel, bucket_bytes: int) -> None:
        super().__init__(channel, bucket_bytes)
        self._staging: list[torch.Tensor | None] = [None] * NUM_BUFFERS

    def close(self) -> None:
        super().close()
        self._staging = [None] * NUM_BUFFERS

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        num_bytes = total_bytes(boxes)
        self._channel.send_header({"kind": "stream"}, num_bytes)

        def prepare(number: int, piece: Boxes) -> np.ndarray:
            if moves_in_place(piece):
                hash_boxes(piece, digest)
                return spans_of(piece)
            packed = pack(piece, self._buffer(number, piece, num_bytes))
            digest.update(bytes_of(packed))
            return span_of(packed)

        def send(number: int, piece: Boxes, spans: np.ndarray) -> None:
            self._channel.send_spans(spans)

        overlapped(list(pieces(boxes, self._bucket_bytes)), prepare, send)

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        num_bytes = total_bytes(boxes)
        self._channel.expect_stream(num_bytes)

        def receive(number: int, piece: Boxes) -> torch.Tensor | None:
            if moves_in_place(piece):
                self._channel.receive_into(spans_of(piece))
                return None
            values = self._buffer(number, piece, num_bytes)
            self._channel.receive_into(span_of(values))
            return values

        def settle(number: int, piece: Boxes, values: torch.Tensor | None) -> None:
            if values is not None:
                unpack(values, piece)
            hash_boxes(piece, digest)

        overlapped(list(pieces(boxes, self._bucket_bytes)), receive, settle)

    def _buffer(self, number: int, piece: Boxes, stream_bytes: int) -> torch.Tensor:
        """Bytes for a piece, in the buffer whose turn it is; page-locked when a GPU is at the other end."""
        num_bytes, slot = total_bytes(piece), number % NUM_BUFFERS
        buffer = self._staging[slot]
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, min(self._bucket_bytes, stream_bytes))
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=piece.device.type == "cuda")
            self._staging[slot] = buffer
        return buffer[:num_bytes]


def moves_in_place(boxes: Boxes) -> bool:
    """Whether the kernel takes the boxes from where they lie, or writes them there."""
    if not boxes.matrices.are_in_place:
        return False
    extents = boxes.extents
    return bool((extents.is_whole_N | (extents.row_bytes_N >= _SHORT_ROW_BYTES)).all())
