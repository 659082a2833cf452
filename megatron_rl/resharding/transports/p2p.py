"""Point to point over the pair's own authenticated connection: one message per pair, from parameters into parameters.

Boxes that lie in host memory in one piece, in the dtype that travels, are handed to the kernel where they are (gather
and scatter lists): no copy on either side. The others (strided, cast, on a GPU) pass through two host buffers of a bucket
each. Packing and hashing of one bucket overlap with the sending of the one before, hashing with the receiving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.resharding.boxes import Box, bytes_of, pack, pieces, read_bytes, spans_of, total_bytes, unpack
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.transports.protocol import NUM_BUFFERS, overlapped
from megatron_rl.resharding.transports.queued import QueuedTransport


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

        def prepare(number: int, piece: list[Box]) -> list[memoryview]:
            if all(box.is_plain for box in piece):
                spans = spans_of(piece)
            else:
                spans = [bytes_of(pack(piece, self._buffer(number, piece, num_bytes)))]
            for span in spans:
                digest.update(span)
            return spans

        def send(number: int, piece: list[Box], spans: list[memoryview]) -> None:
            self._channel.send_spans(spans)

        overlapped(list(pieces(boxes, self._bucket_bytes)), prepare, send)

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        num_bytes = total_bytes(boxes)
        self._channel.expect_stream(num_bytes)

        def receive(number: int, piece: list[Box]) -> torch.Tensor | None:
            if all(box.is_plain for box in piece):
                self._channel.receive_into(spans_of(piece))
                return None
            values = self._buffer(number, piece, num_bytes)
            self._channel.receive_into([bytes_of(values)])
            return values

        def settle(number: int, piece: list[Box], values: torch.Tensor | None) -> None:
            if values is None:
                spans = spans_of(piece)
            else:
                unpack(values, piece)
                spans = list(read_bytes(piece))
            for span in spans:
                digest.update(span)

        overlapped(list(pieces(boxes, self._bucket_bytes)), receive, settle)

    def _buffer(self, number: int, piece: list[Box], stream_bytes: int) -> torch.Tensor:
        """Bytes for a piece, in the buffer whose turn it is; page-locked when a GPU is at the other end."""
        num_bytes, slot = total_bytes(piece), number % NUM_BUFFERS
        buffer = self._staging[slot]
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, min(self._bucket_bytes, stream_bytes))
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=piece[0].view.is_cuda)
            self._staging[slot] = buffer
        return buffer[:num_bytes]
