"""Point to point over the pair's own authenticated connection: one message per pair, from parameters into parameters.

Boxes that lie in host memory in the dtype that travels are handed to the kernel where they are, row by row where they are
strided (gather and scatter lists): no copy on either side. The others (cast, on a GPU, of short rows) pass through two host
buffers of at most a bucket each. Packing and hashing of one bucket overlap with the sending of the one before, hashing with the
receiving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.resharding.box_memory import bytes_of, hash_boxes, pack, span_of, spans_of, unpack
from megatron_rl.resharding.boxes import Box, Boxes, pieces, runs, total_bytes
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.transports.protocol import NUM_BUFFERS, overlapped
from megatron_rl.resharding.transports.queued import QueuedTransport

_SENT_ROW_BYTES, _RECEIVED_ROW_BYTES = 1024, 128
"""Strided boxes with rows below these pass through a buffer. The sender reads them for the digest anyway: it packs them once
and hashes and sends what it packed. The receiver lets the kernel lay them out, which costs it about 128 bytes per row."""
_PACKED_BYTES = 4 * 1024 * 1024
"""Of such boxes per piece: still in a cache when it is hashed and sent."""


class _Piece(NamedTuple):
    """A bucket of boxes; `spans`: where the kernel takes them from or writes them, None when they pass through a buffer."""

    boxes: Boxes
    spans: np.ndarray | None


class SocketTransport(QueuedTransport):
    """See `Transport`. Holds at most two buckets of `bucket_bytes` beside the parameters.

    Spans are kept from sync to sync, and good for as long as every parameter lies where it lay.
    """

    def __init__(self, channel: Channel, bucket_bytes: int) -> None:
        super().__init__(channel, bucket_bytes)
        self._staging: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._known: tuple[bytes, bytes] = (b"", b"")
        self._rows: list[tuple[np.ndarray, np.ndarray | None]] = []

    def close(self) -> None:
        super().close()
        self._staging = [None] * NUM_BUFFERS
        self._known, self._rows = (b"", b""), []

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        num_bytes = total_bytes(boxes)
        self._channel.send_header({"kind": "stream"}, num_bytes)

        def prepare(number: int, piece: _Piece) -> np.ndarray:
            if piece.spans is not None:
                hash_boxes(piece.boxes, digest)
                return piece.spans
            packed = pack(piece.boxes, self._buffer(number, piece.boxes, num_bytes))
            digest.update(bytes_of(packed))
            return span_of(packed)

        def send(number: int, piece: _Piece, spans: np.ndarray) -> None:
            self._channel.send_spans(spans)

        overlapped(self._pieces(boxes, _SENT_ROW_BYTES), prepare, send)

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        num_bytes = total_bytes(boxes)
        self._channel.expect_stream(num_bytes)

        def receive(number: int, piece: _Piece) -> torch.Tensor | None:
            if piece.spans is not None:
                self._channel.receive_into(piece.spans)
                return None
            values = self._buffer(number, piece.boxes, num_bytes)
            self._channel.receive_into(span_of(values))
            return values

        def settle(number: int, piece: _Piece, values: torch.Tensor | None) -> None:
            if values is not None:
                unpack(values, piece.boxes)
            hash_boxes(piece.boxes, digest)

        overlapped(self._pieces(boxes, _RECEIVED_ROW_BYTES), receive, settle)

    def _pieces(self, boxes: Sequence[Box], shortest_row: int) -> list[_Piece]:
        boxes = Boxes.of(boxes)
        if not boxes.matrices.are_in_place:
            return [_Piece(piece, None) for piece in pieces(boxes, self._bucket_bytes)]
        known = boxes.rows_N5.tobytes(), boxes.matrices.places_M3.tobytes()
        if known != self._known:
            self._known = known
            self._rows = [
                (piece.rows_N5, None if is_packed else spans_of(piece))
                for run, is_packed in runs(boxes, has_short_rows(boxes, shortest_row))
                for piece in pieces(run, min(_PACKED_BYTES, self._bucket_bytes) if is_packed else self._bucket_bytes)
            ]
        return [_Piece(Boxes(boxes.matrices, rows, ()), spans) for rows, spans in self._rows]

    def _buffer(self, number: int, piece: Boxes, stream_bytes: int) -> torch.Tensor:
        """Bytes for a piece, in the buffer whose turn it is; page-locked when a GPU is at the other end."""
        num_bytes, slot = total_bytes(piece), number % NUM_BUFFERS
        buffer = self._staging[slot]
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, min(self._bucket_bytes, stream_bytes))
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=piece.device.type == "cuda")
            self._staging[slot] = buffer
        return buffer[:num_bytes]


def has_short_rows(boxes: Boxes, shortest: int) -> np.ndarray:
    """Which boxes are strided, with rows of fewer bytes than `shortest`."""
    extents = boxes.extents
    return ~extents.is_whole_N & (extents.row_bytes_N < shortest)
