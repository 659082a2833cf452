"""The engine's side of a weight sync: one receiver per tensor-parallel rank, a thread beside the engine.

It knows parameter names, shapes and bytes, and nothing of the trainer. Slices are written straight into the engine's
parameters, then read back from there for the digest, so that the digest speaks of what the engine will use. The engine
must be paused between `begin` and the commit: the receiver does not know the engine.

Messages (JSON header, raw payload): `describe` -> params; `begin` (version, sources); `open` (version, source, digests
that the sender can compute, staging buffers if any) -> the digest that both will compute; `bucket` (version, source,
boxes, bytes); `end` (version, source) -> digest; `finish` (version) -> digests and number of elements. Over TCP a
bucket carries its bytes and is not answered; over CUDA IPC it names a staging buffer and is answered once that may be
overwritten.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.resharding.channel import Channel, ChannelError, accept
from megatron_rl.resharding.cuda_ipc import MappedBuffers
from megatron_rl.resharding.digest import Digest, choose_digest, new_digest

_IDLE_TIMEOUT_S = 3600.0
_HANDSHAKE_TIMEOUT_S = 10.0


class _Update:
    """What arrived for one version so far."""

    def __init__(self, version: int, sources: list[int]) -> None:
        self.version = version
        self.sources = frozenset(sources)
        self.hashes: dict[int, Digest] = {}
        self.staging: dict[int, MappedBuffers] = {}
        self.ended: set[int] = set()
        self.num_elements = 0
        self.is_broken = False

    def open(self, source: int, offered: list[str], staging: dict[str, Any] | None) -> dict[str, Any]:
        if source not in self.sources or source in self.hashes:
            raise ValueError(f"trainer rank {source} may not open here; expected once each: {sorted(self.sources)}")
        name = choose_digest(offered)
        if staging is not None:
            self.staging[source] = MappedBuffers(staging)
        self.hashes[source] = new_digest(name)
        return {"digest": name}

    def end(self, source: int) -> dict[str, Any]:
        digest = self.hash_of(source).hexdigest()
        if source in self.staging:
            self.staging.pop(source).close()
        self.ended.add(source)
        return {"digest": digest}

    def hash_of(self, source: int) -> Digest:
        if source not in self.hashes:
            raise ValueError(f"trainer rank {source} sent something before it opened")
        return self.hashes[source]


class Receiver:
    """Listens on `host` (a free port) and writes authenticated slices into `params`.

    Start it with `start()`; `address` is known from construction on. A connection that breaks the protocol is answered
    with one error line and closed; the update it belonged to cannot be finished.
    """

    def __init__(self, params: dict[str, torch.Tensor], key: bytes, host: str = "127.0.0.1") -> None:
        self._params = params
        self._key = key
        self._listener = socket.create_server((host, 0))
        self._update: _Update | None = None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept_loop, name="weight-receiver", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        with contextlib.suppress(OSError):  # not connected; on Linux it wakes accept(), which close() alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the peer may have closed it already
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, f"{peer[0]}:{peer[1]}"), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        self._connections.add(connection)
        try:
            channel = accept(connection, peer, self._key, _HANDSHAKE_TIMEOUT_S)
            connection.settimeout(_IDLE_TIMEOUT_S)
            while True:
                header, payload = channel.receive()
                self._answer(channel, header, payload)
        except (ChannelError, OSError):
            pass  # the sender went away: `finish` will tell that its part is missing
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, channel: Channel, header: dict[str, Any], payload: bytearray) -> None:
        try:
            answer = self._handle(header, payload)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # it does not fit: say so, drop the peer
            with self._lock:
                if self._update is not None and header.get("version") == self._update.version:
                    self._update.is_broken = True
            channel.send({"error": f"{type(error).__name__}: {error}"})
            raise ChannelError(f"{channel.peer}: sent a message that does not fit ({error})") from error
        if answer is not None:
            channel.send(answer)

    def _handle(self, header: dict[str, Any], payload: bytearray) -> dict[str, Any] | None:
        kind = header["kind"]
        if kind == "describe":
            return {"params": {n: [list(p.shape), dtype_name(p.dtype)] for n, p in self._params.items()}}
        if kind == "begin":
            with self._lock:
                self._update = _Update(header["version"], header["sources"])
            return {"ok": True}
        update = self._current(header["version"])
        if kind == "open":
            return update.open(header["source"], header["digests"], header.get("staging"))
        if kind == "bucket":
            return self._write_bucket(update, header, payload)
        if kind == "end":
            return update.end(header["source"])
        if kind == "finish":
            return self._finish(update)
        raise ValueError(f"unknown message kind {kind!r}")

    def _current(self, version: int) -> _Update:
        with self._lock:
            if self._update is None or self._update.version != version:
                current = None if self._update is None else self._update.version
                raise ValueError(f"version {version} is not being received (current: {current})")
            return self._update

    def _write_bucket(self, update: _Update, header: dict[str, Any], payload: bytearray) -> dict[str, Any] | None:
        source = header["source"]
        digest, staging = update.hash_of(source), update.staging.get(source)
        if staging is None:
            values = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
            self._write(update, digest, header["boxes"], values)
            return None
        self._write(update, digest, header["boxes"], staging.read(header["buffer"], header["num_bytes"]))
        staging.finish_reading()
        return {"ok": True}

    def _write(self, update: _Update, digest: Digest, boxes: list[list[Any]], values: torch.Tensor) -> None:
        """Copy flat bytes into the boxes, then hash the boxes."""
        length, offset = values.numel(), 0
        targets = []
        for name, row, col, num_rows, num_cols in boxes:
            target = box_view(self._params[name], row, col, num_rows, num_cols)
            num_bytes = target.numel() * target.element_size()
            if offset + num_bytes > length:
                raise ValueError(f"bucket of {length} bytes for boxes of at least {offset + num_bytes} bytes")
            part = values[offset : offset + num_bytes]
            if part.storage_offset() % target.element_size():
                raise ValueError(f"'{name}' begins at byte {offset}, unaligned for {dtype_name(target.dtype)}")
            target.copy_(part.view(target.dtype).view(num_rows, num_cols))
            targets.append(target)
            offset += num_bytes
        if offset != length:
            raise ValueError(f"bucket of {length} bytes for boxes of {offset} bytes")
        for read_back in boxes_bytes(targets):
            digest.update(read_back)
        with self._lock:
            update.num_elements += sum(target.numel() for target in targets)

    def _finish(self, update: _Update) -> dict[str, Any]:
        missing = sorted(update.sources - update.ended)
        if update.is_broken:
            raise ValueError(f"version {update.version} is incomplete: a sender's message did not fit")
        if missing:
            raise ValueError(f"version {update.version} is incomplete: no end from trainer ranks {missing}")
        digests = {str(source): digest.hexdigest() for source, digest in update.hashes.items()}
        with self._lock:
            self._update = None
        return {"num_elements": update.num_elements, "digests": digests}


def box_view(param: torch.Tensor, row: int, col: int, num_rows: int, num_cols: int) -> torch.Tensor:
    """The box as a view of the parameter's matrix. Raises ValueError when it does not lie inside."""
    matrix = param.detach()
    matrix = matrix.unsqueeze(1) if matrix.ndim == 1 else matrix.view(-1, matrix.shape[-1])
    if row < 0 or col < 0 or row + num_rows > matrix.shape[0] or col + num_cols > matrix.shape[1]:
        raise ValueError(f"box [{row}:{row + num_rows}, {col}:{col + num_cols}] is outside {tuple(matrix.shape)}")
    return matrix[row : row + num_rows, col : col + num_cols]


def box_bytes(box: torch.Tensor) -> memoryview:
    """The raw bytes of a box in row order, for hashing and sending."""
    return memoryview(box.contiguous().view(-1).view(torch.uint8).cpu().numpy())


def boxes_bytes(boxes: list[torch.Tensor]) -> Iterator[memoryview]:
    """The raw bytes of boxes one after another. From a GPU they come in one copy: each would wait for the device."""
    if boxes and boxes[0].is_cuda:
        boxes = [torch.cat([box.reshape(-1) for box in boxes])]
    yield from map(box_bytes, boxes)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
