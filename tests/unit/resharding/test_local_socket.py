"""Who is reached within the machine, and who is not."""

from __future__ import annotations

import os
import socket

import pytest

from megatron_rl.resharding import channel, local_socket
from megatron_rl.resharding.local_socket import connect_locally, listen_locally, peer_of
from megatron_rl.resharding.receiver import Receiver
from tests.unit.resharding.rig import KEY, TIMEOUT_S


@pytest.fixture
def port():
    """One that nobody else takes meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def test_both_ends_know_whom_they_speak_to(port):
    with listen_locally("127.0.0.1", port) as listener, connect_locally("127.0.0.1", port, TIMEOUT_S) as connection:
        accepted, _ = listener.accept()
        with accepted:
            assert peer_of(accepted) == peer_of(connection) == (os.getpid(), os.geteuid())


def test_another_port_interface_or_user_is_not_reached(port, monkeypatch):
    with listen_locally("127.0.0.1", port) as listener:
        assert connect_locally("127.0.0.2", port, TIMEOUT_S) is None
        assert connect_locally("127.0.0.1", port + 1, TIMEOUT_S) is None
        monkeypatch.setattr(local_socket.os, "geteuid", lambda: os.getuid() + 1)
        assert connect_locally("127.0.0.1", port, TIMEOUT_S) is None
    listener.close()
    monkeypatch.undo()
    assert connect_locally("127.0.0.1", port, TIMEOUT_S) is None


@pytest.mark.parametrize("has_name", [True, False])
def test_a_receiver_is_reached_over_tcp_where_its_name_is_taken(monkeypatch, has_name):
    taken = []

    def listen(host, port):
        if not has_name:
            taken.append(listen_locally(host, port))
        return listen_locally(host, port)

    monkeypatch.setattr("megatron_rl.resharding.receiver.listen_locally", listen)
    monkeypatch.setattr(channel, "connect_locally", lambda *address: connect_locally(*address) if has_name else None)
    receiver = Receiver({}, KEY)
    receiver.start()
    opened = channel.connect(*receiver.address, KEY, TIMEOUT_S)
    assert opened.ask({"kind": "describe"}) == {"params": {}}
    assert opened._socket.family == (socket.AF_UNIX if has_name else socket.AF_INET)
    opened.close()
    receiver.close()
    for listener in taken:
        listener.close()


def test_an_impostor_of_this_user_is_refused(port):
    """It cannot prove the key; nothing is sent to it."""
    with listen_locally("127.0.0.1", port) as listener:
        listener.settimeout(TIMEOUT_S)
        with pytest.raises(channel.ChannelError, match="another run or has another key"):
            channel.connect("127.0.0.1", port, KEY, 0.3)
