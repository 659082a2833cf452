"""A Unix socket beside a receiver's TCP port: within one machine it moves bytes in about half of TCP's time.

Its name is in Linux's abstract namespace, which belongs to the network namespace (machine or container): it follows from the
address, needs no file, and is gone with the process. Whoever answers must also be of the caller's user; keys are proven on it
as over TCP.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


def listen_locally(host: str, port: int) -> socket.socket | None:
    """The socket beside `host:port`; None where another process has its name."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name_of(host, port))
    except OSError:
        listener.close()
        return None
    listener.listen()
    return listener


def connect_locally(host: str, port: int, timeout_s: float) -> socket.socket | None:
    """A connection to the receiver at `host:port` within this machine; None when none of this user answers there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(_name_of(host, port))
        if peer_of(connection)[1] == os.geteuid():
            return connection
    except OSError:  # it is elsewhere
        pass
    connection.close()
    return None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    process, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _name_of(host: str, port: int) -> str:
    return f"\0megatron_rl-weights-{host}:{port}"
