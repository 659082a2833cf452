"""The engine's side of a weight sync: one receiver per tensor-parallel rank, threads beside the engine.

It knows parameter names, shapes and bytes, and nothing of the trainer. Slices are written straight into the engine's
parameters (or into host memory beside them, `sync.staging`), then read back from there for the digest, so that the
digest speaks of what the engine will use. Without staging the engine must be paused between `begin` and the commit: the
receiver does not know the engine.

Messages (JSON header, raw payload). From the controller, one connection: `describe` -> params, host; `begin` (sync,
version, sources, staged); `relay` (sync, what, to whom) -> digest; `finish` (sync) -> digests, number of elements; `apply`
(sync), after staging. From each trainer rank, and from an engine rank that passes slices on, one connection for all syncs:
`table` (names, boxes), once; `open` (sync, source, transport, digests, base of a delta if there is one) -> the digest that
both will compute, and whether the delta fits what stands here; the delta or what the transport says; then -> digest of what
stands in the boxes. An update whose sender breaks the protocol, dies or is silent too long cannot be finished.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.box_memory import hash_boxes
from megatron_rl.resharding.boxes import PairTable, dtype_name, total_bytes
from megatron_rl.resharding.channel import Channel, ChannelError, accept, end_connection
from megatron_rl.resharding.delta import apply_delta
from megatron_rl.resharding.digest import DIGEST_NAMES, choose_digest, new_digest
from megatron_rl.resharding.host import describe_host
from megatron_rl.resharding.incoming import IncomingUpdate
from megatron_rl.resharding.local_socket import listen_locally, peer_of
from megatron_rl.resharding.precision import count_weights
from megatron_rl.resharding.relay import Passer
from megatron_rl.resharding.transports.protocol import Transport
from megatron_rl.resharding.transports.table import build_transport

_IDLE_TIMEOUT_S = 24 * 3600.0
_HANDSHAKE_TIMEOUT_S = 10.0


class Receiver:
    """Listens on `host` (a free port) and writes authenticated slices into `params`.

    `is_local`: senders of this machine come over a Unix socket beside the port.

    Start it with `start()`; `address` is known from construction on. A connection that breaks the protocol is answered
    with one error line and closed; the update it belonged to cannot be finished.
    """

    def __init__(self, params: dict[str, torch.Tensor], key: bytes, host: str = "127.0.0.1", *, is_local: bool = True) -> None:
        self._params = params
        self._staged: dict[str, torch.Tensor] = {}
        self._key = key
        self._listener = socket.create_server((host, 0))
        local = listen_locally(*self.address) if is_local else None
        self._listeners = [self._listener] if local is None else [local, self._listener]
        self._update: IncomingUpdate | None = None
        self._tables: dict[int, PairTable] = {}
        self._held: dict[int, tuple[bool, str]] = {}
        """What each trainer rank's boxes hold: whether beside the parameters, and its digest; the base of a delta."""
        self._passer = Passer(key)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads = [
            threading.Thread(target=self._accept_loop, args=(listener,), name="weight-receiver", daemon=True)
            for listener in self._listeners
        ]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # not connected; on Linux it wakes accept(), which close() alone does not
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._connections):
            _shut(connection)
        self._passer.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5.0)

    def _accept_loop(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return  # closed
            peer = f"{address[0]}:{address[1]}" if address else f"process {peer_of(connection)[0]}"
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        self._connections.add(connection)
        transports: dict[str, Transport] = {}
        try:
            channel = accept(connection, peer, self._key, _HANDSHAKE_TIMEOUT_S)
            while True:
                channel.set_timeout(_IDLE_TIMEOUT_S)
                header, payload = channel.receive()
                self._answer(channel, connection, transports, header, payload)
        except (ChannelError, OSError):
            pass  # the sender went away: `finish` will tell that its part is missing
        finally:
            for transport in transports.values():
                transport.close()
            self._connections.discard(connection)
            end_connection(connection)

    def _answer(
        self,
        channel: Channel,
        connection: socket.socket,
        transports: dict[str, Transport],
        header: dict[str, Any],
        payload: bytearray,
    ) -> None:
        try:
            if header["kind"] == "open":
                answer = self._receive(channel, connection, transports, header)
            else:
                answer = self._handle(header, payload)
        except ChannelError:
            raise
        except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:  # it does not fit: say so, drop the peer
            channel.refuse(f"{type(error).__name__}: {error}")
            raise ChannelError(f"{channel.peer}: sent a message that does not fit ({error})") from error
        channel.send(answer)

    def _handle(self, header: dict[str, Any], payload: bytearray) -> dict[str, Any]:
        kind = header["kind"]
        if kind == "describe":
            return {"params": {n: [list(p.shape), dtype_name(p.dtype)] for n, p in self._params.items()}}
        if kind == "table":
            table = PairTable(tuple(header["names"]), np.frombuffer(payload, dtype=np.int64).reshape(-1, 5))
            table.resolve(self._params)  # names what does not fit
            with self._lock:
                self._tables[header["source"]] = table
                self._held.pop(header["source"], None)
            return {"host": describe_host(self._device), "digests": DIGEST_NAMES}
        if kind == "begin":
            self._begin(IncomingUpdate(header["sync"], header["version"], header["sources"], header["staged"]))
            return {"ok": True}
        if kind == "finish":
            update = self._current(header["sync"])
            update.require_whole()
            return {"num_elements": update.num_elements, "digests": {str(s): d for s, d in update.digests.items()}}
        if kind == "relay":
            update = self._current(header["sync"])
            update.require(header["needs"])
            try:
                return {"digest": self._passer.pass_on(self._written(update), header, payload)}
            except ChannelError as error:  # of the connection to the neighbour, not of this one
                raise RuntimeError(str(error)) from error
        if kind == "apply":
            return self._apply(self._current(header["sync"]))
        raise ValueError(f"unknown message kind {kind!r}")

    def _begin(self, update: IncomingUpdate) -> None:
        """The one before ends first, so that a late slice of it is never written over a new one."""
        with self._lock:
            before, self._update = self._update, None
        if before is not None:
            before.close()
        if update.is_staged and not self._staged:
            self._staged = {name: _beside(param) for name, param in self._params.items()}
        with self._lock:
            self._update = update

    def _current(self, sync: str) -> IncomingUpdate:
        with self._lock:
            if self._update is None or self._update.sync != sync:
                current = None if self._update is None else self._update.version
                raise ValueError(f"sync {sync} is not being received (current version: {current})")
            return self._update

    def _receive(
        self, channel: Channel, connection: socket.socket, transports: dict[str, Transport], header: dict[str, Any]
    ) -> dict[str, Any]:
        """One trainer rank's slices of one sync."""
        source, name = header["source"], header["transport"]
        update = self._current(header["sync"])
        with update.writing(source, lambda: _shut(connection)):
            table = self._tables[source]
            digest_name = choose_digest(header["digests"])
            digest = new_digest(digest_name)
            if name not in transports:
                transports[name] = build_transport(name, channel, header["bucket_bytes"], self._device)
            boxes = table.resolve(self._written(update))
            held = self._held.pop(source, None)
            takes_delta = header["delta_base"] is not None and held == (update.is_staged, header["delta_base"])
            channel.set_timeout(header["timeout_s"])
            channel.send({"digest": digest_name, "delta": takes_delta})
            if takes_delta:
                apply_delta(channel.receive_payload("delta", total_bytes(boxes)), boxes)
                hash_boxes(boxes, digest)
            else:
                transports[name].submit_recv(boxes)
                transports[name].run(digest)
            self._held[source] = (update.is_staged, digest.hexdigest())
            update.end(source, digest_name, digest.hexdigest(), count_weights(table))
        return {"digest": digest.hexdigest()}

    def _written(self, update: IncomingUpdate) -> dict[str, torch.Tensor]:
        """Where its slices land."""
        return self._staged if update.is_staged else self._params

    def _apply(self, update: IncomingUpdate) -> dict[str, Any]:
        """Bring a staged update into the parameters, and check there that it stands as it was received."""
        update.require_whole()
        for name in {name for source in update.sources for name in self._tables[source].names}:
            self._params[name].detach().copy_(self._staged[name])
        for source, received in update.digests.items():
            digest = new_digest(update.algorithms[source])
            hash_boxes(self._tables[source].resolve(self._params), digest)
            if digest.hexdigest() != received:
                raise ValueError(f"version {update.version}: what trainer rank {source} sent changed on its way from staging")
        return {"ok": True}

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.values())).device


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have closed it already
        connection.shutdown(socket.SHUT_RDWR)


def _beside(param: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked when the parameter is on a GPU."""
    host = torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda)
    return host.copy_(param.detach())
