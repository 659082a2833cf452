"""Ending a connection while the peer sends. What else a channel does is seen in test_receiver and transports/."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import torch

from megatron_rl.resharding.box_memory import span_of
from megatron_rl.resharding.channel import Channel, ChannelError, end_connection


def test_a_peer_that_waits_for_room_to_send_knows_at_once():
    """After a shutdown alone its kernel would probe a window of zero for a minute: nobody reads, and nobody says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    values = torch.zeros(64 * 1024 * 1024, dtype=torch.uint8)
    errors: list[ChannelError] = []

    def send() -> None:
        try:
            Channel(sender, "receiver r", 20.0).send_spans(span_of(values))
        except ChannelError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + 10.0
    while select.select([], [sender], [], 0.01)[1]:
        assert time.monotonic() < deadline, "the sender never had to wait"
    receiver.shutdown(socket.SHUT_RDWR)
    receiver.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        while receiver.recv(1024 * 1024):
            pass
    begun = time.monotonic()
    end_connection(receiver)
    thread.join(15.0)
    waited_s = time.monotonic() - begun
    sender.close()
    assert not thread.is_alive() and len(errors) == 1 and waited_s < 10.0
    assert "connection lost" in str(errors[0]) or "closed the connection" in str(errors[0])
