"""Every transport forgets its boxes: when they have moved, when moving failed, and when it is closed."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest
import torch

from megatron_rl.resharding.boxes import Box
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import DIGEST_NAMES, new_digest
from megatron_rl.resharding.transports.queued import QueuedTransport
from megatron_rl.resharding.transports.table import TRANSPORTS, build_transport


def boxes(seed: int) -> list[Box]:
    generator = torch.Generator().manual_seed(seed)
    return [Box(torch.randn(shape, generator=generator), torch.float32) for shape in ((3, 5), (2, 7))]


class Recorder(QueuedTransport):
    def __init__(self) -> None:
        super().__init__(None, 64)
        self.moved = []

    def _send(self, boxes, digest):
        self.moved.append(("send", list(boxes)))

    def _receive(self, boxes, digest):
        self.moved.append(("receive", list(boxes)))
        raise ValueError("does not fit")


def test_a_run_moves_what_was_submitted_since_the_last_and_nothing_twice():
    transport, outgoing = Recorder(), boxes(1)
    transport.submit_send(outgoing)
    transport.run(new_digest(DIGEST_NAMES[0]))
    transport.run(new_digest(DIGEST_NAMES[0]))
    assert transport.moved == [("send", outgoing)]


def test_a_run_that_failed_leaves_nothing_for_the_next():
    transport, incoming = Recorder(), boxes(2)
    transport.submit_recv(incoming)
    with pytest.raises(ValueError, match="does not fit"):
        transport.run(new_digest(DIGEST_NAMES[0]))
    transport.run(new_digest(DIGEST_NAMES[0]))
    assert transport.moved == [("receive", incoming)]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_closed_transport_keeps_no_weights_alive(name):
    left, right = socket.socketpair()
    transport = build_transport(name, Channel(left, "peer", 10.0), 64, torch.device("cpu"))
    assert isinstance(transport, QueuedTransport)
    submitted = boxes(3)
    watched = [weakref.ref(box.view) for box in submitted]
    transport.submit_send(submitted)
    transport.submit_recv(submitted)
    transport.close()
    del submitted
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    left.close(), right.close()
