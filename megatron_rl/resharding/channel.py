"""An authenticated message channel over TCP, within a machine over a Unix socket: a JSON header and raw bytes, no pickle.

Both sides prove that they know the run's key (HMAC-SHA256 over both nonces) before anything else is read. The channel is
not encrypted: what it carries is checked by digests, and it belongs on the cluster's own interface.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_rl.resharding.local_socket import connect_locally
from megatron_rl.resharding.vectored import receive_all, send_all

Address = tuple[str, int]
"""Interface and port of a receiver."""

_PREFIX = struct.Struct("!IQ")  # header bytes, payload bytes
_NONCE_BYTES = 32
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_REFUSE_S, _REFUSE_BYTES = 5.0, 1024 * 1024
_LOCAL_BUFFER_BYTES = 256 * 1024
"""Of a connection within one machine: what the sender copied in is still in the core's cache when it is copied out."""


class ChannelError(ConnectionError):
    """The peer is absent, knows another key, closed the connection or reported an error; the message is one line."""


class PeerRefusedError(ChannelError):
    """The peer is there and answered with an error; the message carries its line."""


class Channel:
    """One authenticated connection. No wait lasts longer than the timeout. One thread at a time in each direction."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self._socket = connection
        self.peer = peer
        self._hangup = select.poll()
        self._hangup.register(connection, select.POLLRDHUP)
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """The longest that any single wait may take from now on. The kernel keeps it: a call moves all that it can."""
        self.timeout_s = timeout_s
        self._socket.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        self.send_header(header, len(payload))
        with self._reporting():
            self._socket.sendall(payload)

    def send_header(self, header: dict[str, Any], payload_bytes: int) -> None:
        """Announce a payload that `send_spans` will carry."""
        encoded = json.dumps(header, separators=(",", ":")).encode()
        with self._reporting():
            self._socket.sendall(_PREFIX.pack(len(encoded), payload_bytes) + encoded)

    def send_spans(self, spans_S2: np.ndarray) -> None:
        """Bytes of a payload, straight from where they lie: (address, bytes) of each span."""
        with self._reporting():
            send_all(self._socket, spans_S2)

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """The next message. Raises ChannelError when the peer closes the connection or stays silent too long."""
        header, payload_bytes = self.receive_header()
        if payload_bytes > _MAX_HEADER_BYTES:
            raise ChannelError(f"{self.peer}: unexpected payload of {payload_bytes} bytes")
        return header, self._read(payload_bytes)

    def receive_header(self) -> tuple[dict[str, Any], int]:
        """The next message's header and the size of its payload, which is still to be read (`receive_into`)."""
        header_bytes, payload_bytes = _PREFIX.unpack(self._read(_PREFIX.size))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ChannelError(f"{self.peer}: header of {header_bytes} bytes; not a peer of this protocol")
        return json.loads(bytes(self._read(header_bytes))), payload_bytes

    def receive_into(self, spans_S2: np.ndarray) -> None:
        """Bytes of a payload, straight to where they belong: (address, bytes) of each span."""
        with self._reporting():
            if not receive_all(self._socket, spans_S2):
                raise ChannelError(f"{self.peer}: closed the connection")

    def ask(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> dict[str, Any]:
        """Send and wait for the answer. Raises ChannelError with the peer's own line when it reports an error."""
        self.send(header, payload)
        return self.expect()

    def expect(self) -> dict[str, Any]:
        """The next answer. Raises ChannelError with the peer's own line when it reports an error."""
        answer, _ = self.receive()
        self._raise_reported(answer)
        return answer

    def expect_stream(self, num_bytes: int) -> None:
        """The header of a payload of exactly `num_bytes`. Raises ChannelError for anything else."""
        found = self._payload_of("stream")
        if found != num_bytes:
            raise ChannelError(f"{self.peer}: expected a stream of {num_bytes} bytes, got one of {found}")

    def receive_payload(self, kind: str, most_bytes: int) -> bytearray:
        """The payload of a message of this kind. Raises ChannelError for anything else, and for more bytes."""
        num_bytes = self._payload_of(kind)
        if num_bytes > most_bytes:
            raise ChannelError(f"{self.peer}: expected a {kind} of at most {most_bytes} bytes, got one of {num_bytes}")
        return self._read(num_bytes)

    def _payload_of(self, kind: str) -> int:
        header, payload_bytes = self.receive_header()
        self._raise_reported(header)
        if header.get("kind") != kind:
            raise ChannelError(f"{self.peer}: expected a {kind}, got {header.get('kind')!r}")
        return payload_bytes

    def _raise_reported(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise PeerRefusedError(f"{self.peer}: {answer['error']}")

    def is_ended(self) -> bool:
        """Whether the peer will say no more than what is on its way: it closed its end, or this one is shut. Never waits."""
        return bool(self._hangup.poll(0))

    def refuse(self, line: str) -> None:
        """Answer with an error that the peer will read even while it sends: its bytes are taken in for a short while."""
        self.send({"error": line})
        deadline = time.monotonic() + _REFUSE_S
        self.set_timeout(_REFUSE_S)
        with contextlib.suppress(OSError):  # it went away, or goes on sending: the line was said
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_REFUSE_BYTES) and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        """Also wakes a thread that waits in another call, which then raises ChannelError."""
        with contextlib.suppress(OSError):  # the peer closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        end_connection(self._socket)

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        left = memoryview(buffer)
        with self._reporting():
            while len(left):
                received = self._socket.recv_into(left, 0, socket.MSG_WAITALL)
                if received == 0:
                    raise ChannelError(f"{self.peer}: closed the connection")
                left = left[received:]
        return buffer

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Whatever happens to the connection is a ChannelError."""
        try:
            yield
        except ChannelError:
            raise
        except BlockingIOError:
            raise ChannelError(f"{self.peer}: nothing moved within {self.timeout_s:.0f} s") from None
        except OSError as error:
            raise ChannelError(f"{self.peer}: connection lost ({error})") from error


def end_connection(connection: socket.socket) -> None:
    """Close so that the peer knows at once. A plain close after a shutdown leaves a peer that waits for room to send waiting,
    until the kernel forgets our half-closed end after a minute (tcp_fin_timeout): a reset wakes it."""
    with contextlib.suppress(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def connect(host: str, port: int, key: bytes, timeout_s: float) -> Channel:
    """Connect and prove both sides. Raises ChannelError when nobody listens or the keys differ."""
    peer = f"receiver {host}:{port}"
    try:
        connection = connect_locally(host, port, timeout_s) or socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ChannelError(f"{peer}: cannot connect ({error})") from error
    channel = _open(connection, peer, timeout_s)
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
    channel = _open(connection, peer, timeout_s)
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


def _open(connection: socket.socket, peer: str, timeout_s: float) -> Channel:
    is_tcp = connection.family != socket.AF_UNIX
    if is_tcp:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not is_tcp or connection.getsockname()[0] == connection.getpeername()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _LOCAL_BUFFER_BYTES)
    return Channel(connection, peer, timeout_s)


def _proof(key: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return hmac.digest(key, role + sender_nonce + receiver_nonce, "sha256")
