"""What every transport does with its boxes before and after they move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_rl.resharding.boxes import Box
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import Digest


class QueuedTransport(ABC):
    """A `Transport` but for how the bytes move. Boxes are forgotten when they have moved, and when `run` fails: a sync
    that is tried again submits them anew, and nothing keeps a model's memory alive between syncs."""

    def __init__(self, channel: Channel, bucket_bytes: int) -> None:
        self._channel, self._bucket_bytes = channel, bucket_bytes
        self._outgoing: Sequence[Box] = ()
        self._incoming: Sequence[Box] = ()

    def submit_send(self, boxes: Sequence[Box]) -> None:
        self._outgoing = boxes

    def submit_recv(self, boxes: Sequence[Box]) -> None:
        self._incoming = boxes

    def run(self, digest: Digest) -> None:
        outgoing, incoming = self._outgoing, self._incoming
        self._outgoing = self._incoming = ()
        if outgoing:
            self._send(outgoing, digest)
        if incoming:
            self._receive(incoming, digest)

    def close(self) -> None:
        self._outgoing = self._incoming = ()

    @abstractmethod
    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        """Move the boxes out; `boxes` is not empty."""

    @abstractmethod
    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        """Fill the boxes; `boxes` is not empty."""
