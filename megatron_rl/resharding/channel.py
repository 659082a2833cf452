"""An authenticated message channel over TCP: a JSON header and raw bytes, no pickle.

Both sides prove that they know the run's key (HMAC-SHA256 over both nonces) before anything else is read. The channel is
not encrypted: what it carries is checked by digests, and it belongs on the cluster's own interface.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

_PREFIX = struct.Struct("!IQ")  # header bytes, payload bytes
_NONCE_BYTES = 32
_MAX_HEADER_BYTES = 64 * 1024 * 1024


class ChannelError(ConnectionError):
    """The peer is absent, knows another key, closed the connection or reported an error; the message is one line."""


class Channel:
    """One authenticated connection. Every call is bounded by the socket's timeout. Not for use by two threads at once."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket = connection
        self.peer = peer

    def send(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        encoded = json.dumps(header, separators=(",", ":")).encode()
        try:
            self._socket.sendall(_PREFIX.pack(len(encoded), len(payload)) + encoded)
            if len(payload):
                self._socket.sendall(payload)
        except OSError as error:
            raise ChannelError(f"{self.peer}: sending failed ({error})") from error

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """The next message. Raises ChannelError when the peer closes the connection or stays silent too long."""
        header_bytes, payload_bytes = _PREFIX.unpack(self._read(_PREFIX.size))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ChannelError(f"{self.peer}: header of {header_bytes} bytes; not a peer of this protocol")
        header = json.loads(bytes(self._read(header_bytes)))
        return header, self._read(payload_bytes)

    def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        """Send and wait for the answer. Raises ChannelError with the peer's own line when it reports an error."""
        self.send(header)
        return self.expect()

    def expect(self) -> dict[str, Any]:
        """The next answer. Raises ChannelError with the peer's own line when it reports an error."""
        answer, _ = self.receive()
        if "error" in answer:
            raise ChannelError(f"{self.peer}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        view, filled = memoryview(buffer), 0
        try:
            while filled < num_bytes:
                count = self._socket.recv_into(view[filled:])
                if count == 0:
                    raise ChannelError(f"{self.peer}: closed the connection")
                filled += count
        except TimeoutError:
            raise ChannelError(f"{self.peer}: no answer within {self._socket.gettimeout():.0f} s") from None
        except ConnectionError as error:
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(f"{self.peer}: connection lost ({error})") from error
        return buffer


def connect(host: str, port: int, key: bytes, timeout_s: float) -> Channel:
    """Connect and prove both sides. Raises ChannelError when nobody listens or the keys differ."""
    peer = f"receiver {host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ChannelError(f"{peer}: cannot connect ({error})") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, peer)
    try:
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        other = bytes(channel._read(_NONCE_BYTES))
        connection.sendall(_proof(key, b"sender", own, other))
        answer = bytes(channel._read(hashlib.sha256().digest_size))
        if not hmac.compare_digest(answer, _proof(key, b"receiver", own, other)):
            raise ChannelError(f"{peer}: does not know this run's key")
    except (OSError, ChannelError) as error:
        connection.close()
        raise ChannelError(f"{peer}: refused the connection; it belongs to another run or has another key ({error})") from None
    return channel


def accept(connection: socket.socket, peer: str, key: bytes, timeout_s: float) -> Channel:
    """The receiving half of `connect`. Raises ChannelError, after closing, when the peer does not know the key."""
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, peer)
    try:
        other = bytes(channel._read(_NONCE_BYTES))
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        proof = bytes(channel._read(hashlib.sha256().digest_size))
        if not hmac.compare_digest(proof, _proof(key, b"sender", other, own)):
            raise ChannelError(f"{peer}: wrong key")
        connection.sendall(_proof(key, b"receiver", other, own))
    except (OSError, ChannelError):
        connection.close()
        raise
    return channel


def _proof(key: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return hmac.digest(key, role + sender_nonce + receiver_nonce, "sha256")
