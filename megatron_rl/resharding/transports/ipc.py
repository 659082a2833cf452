"""Colocated: trainer and engine rank on one machine hand memory to each other instead of sending it.

Host memory (`SharedMemoryTransport`): the trainer's parameters move, once and in place, into nameless shared memory; the
engine rank maps it and copies its boxes out of it, cast and all, in one pass. Nothing has a name in the file system, so
whatever dies leaves nothing behind. GPU memory (`CudaIpcTransport`): boxes pass through two staging buffers on the
device that the engine rank maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.resharding.box_memory import bytes_of, hash_boxes, memory_at, read_bytes, unpack
from megatron_rl.resharding.boxes import Box, Boxes, Extents, dtype_name, dtype_of, pieces, runs, total_bytes
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.cuda_ipc import MappedBuffers, StagingBuffers
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.row_copy import copy_rows
from megatron_rl.resharding.transports.protocol import NUM_BUFFERS
from megatron_rl.resharding.transports.queued import QueuedTransport

_BLOCK_BYTES = 512 * 1024
"""Copied and hashed at once: half of a core's cache, so that hashing reads no memory."""
_share_lock = threading.Lock()
_SharedKey = tuple[int, int, int, int]
"""Process, descriptor, inode, number of bytes."""


class SharedMemoryTransport(QueuedTransport):
    """See `Transport`. The engine rank keeps what it mapped until `close` or until the trainer shares something else."""

    def __init__(self, channel: Channel, bucket_bytes: int) -> None:
        super().__init__(channel, bucket_bytes)
        self._mapped: dict[_SharedKey, torch.Tensor] = {}

    def close(self) -> None:
        super().close()
        self._mapped.clear()

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, table_N5 = describe_shared(Boxes.of(boxes))
        self._channel.send(header, table_N5.tobytes())
        hash_boxes(boxes, digest)
        self._channel.expect()  # until then the engine rank reads here

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, payload = self._channel.receive()
        targets = Boxes.of(boxes)
        copy_boxes(self._open(header, np.frombuffer(payload, dtype=np.int64).reshape(-1, 5)), targets, digest)
        self._channel.send({"ok": True})

    def _open(self, header: dict[str, Any], table_N5: np.ndarray) -> SharedBoxes:
        """The trainer's boxes in its memory, mapped here. Raises ValueError when they do not lie in it."""
        keys: list[_SharedKey] = [(header["pid"], fd, inode, num_bytes) for fd, inode, num_bytes in header["storages"]]
        self._mapped = {key: self._mapped[key] if key in self._mapped else map_shared(*key) for key in keys}
        dtypes = [dtype_of(name) for name in header["dtypes"]]
        return SharedBoxes([self._mapped[key].view(dtype) for key, dtype in zip(keys, dtypes, strict=True)], table_N5)


class SharedBoxes:
    """Boxes in mapped storages; `table_N5[i]` is (storage, first element, elements from row to row, rows, cols).

    Raises ValueError for a box that leaves its storage.
    """

    def __init__(self, storages: Sequence[torch.Tensor], table_N5: np.ndarray) -> None:
        self._storages, self._table_N5 = storages, table_N5
        number_N, first_N, pitch_N, rows_N, cols_N = table_N5.T
        if not ((number_N >= 0) & (number_N < len(storages))).all():
            raise ValueError(f"a shared box of another storage than the {len(storages)} mapped ones")
        size_N = np.array([storage.numel() for storage in storages], dtype=np.int64)[number_N]
        is_inside_N = (np.minimum(first_N, pitch_N) >= 0) & (np.minimum(rows_N, cols_N) >= 1)
        is_inside_N &= (first_N <= size_N) & (cols_N <= size_N - first_N)  # sums and products could wrap
        room_N = np.where(is_inside_N, size_N - first_N - cols_N, 0)
        is_inside_N &= (rows_N - 1 <= room_N // np.maximum(pitch_N, 1)) | (pitch_N == 0)
        for bad in np.flatnonzero(~is_inside_N)[:1].tolist():
            raise ValueError(f"a shared box {table_N5[bad, 1:].tolist()} leaves its storage of {size_N[bad]} elements")

    @property
    def shapes_N2(self) -> np.ndarray:
        return self._table_N5[:, 3:]

    @property
    def extents(self) -> Extents:
        number_N, first_N, pitch_N, rows_N, cols_N = self._table_N5.T
        address_M = np.array([storage.data_ptr() for storage in self._storages], dtype=np.int64)
        size_N = np.array([storage.element_size() for storage in self._storages], dtype=np.int64)[number_N]
        return Extents(address_M[number_N] + first_N * size_N, rows_N, cols_N * size_N, pitch_N * size_N)

    def have(self, dtypes: Sequence[torch.dtype]) -> np.ndarray:
        """Which boxes hold the dtypes that are asked for."""
        numbers = self._table_N5[:, 0].tolist()
        return np.array([self._storages[n].dtype == dtype for n, dtype in zip(numbers, dtypes, strict=True)], dtype=bool)

    def view(self, index: int) -> torch.Tensor:
        number, first, pitch, rows, cols = self._table_N5[index].tolist()
        return self._storages[number].as_strided((rows, cols), (pitch, 1), first)


def copy_boxes(sources: SharedBoxes, targets: Boxes, digest: Digest) -> None:
    """Copy each box, and hash it as it then stands while it is in the cache. Raises ValueError when the shapes differ."""
    if not np.array_equal(sources.shapes_N2, targets.rows_N5[:, 3:]):
        raise ValueError(f"{len(sources.shapes_N2)} shared boxes for {len(targets)} boxes here, or other shapes")
    matrices = targets.matrices
    are_same_N = sources.have([matrices.tensors[number].dtype for number in targets.rows_N5[:, 0].tolist()])
    extents, first = sources.extents, 0
    for run, are_same in runs(targets, are_same_N & matrices.are_in_place):
        if are_same:
            _copy_run(extents.part(first, first + len(run)), run, digest)
        else:
            for number, target in enumerate(run, first):
                _copy_views(sources.view(number), target, digest)
        first += len(run)


def _copy_run(sources: Extents, targets: Boxes, digest: Digest) -> None:
    """Byte by byte, a block at a time; each is hashed while it is in the cache."""
    origins, parts = sources.split(_BLOCK_BYTES), targets.split(_BLOCK_BYTES)
    places, are_whole_P = parts.extents, parts.extents.is_whole_N
    rows = zip(
        origins.address_N.tolist(), places.address_N.tolist(), parts.num_bytes_N.tolist(), are_whole_P.tolist(),
        (origins.is_whole_N & are_whole_P).tolist(), strict=True,
    )  # fmt: skip
    for number, (origin, place, num_bytes, is_whole, are_both_whole) in enumerate(rows):
        if are_both_whole:
            ctypes.memmove(place, origin, num_bytes)
        else:
            copy_rows(origins.part(number, number + 1), places.part(number, number + 1))
        if is_whole:
            digest.update(memory_at(place, num_bytes, targets))
        else:
            hash_boxes(parts[number : number + 1], digest)


def _copy_views(source: torch.Tensor, target: Box, digest: Digest) -> None:
    """Where a cast is in the way."""
    if target.num_bytes <= _BLOCK_BYTES and target.view.is_contiguous():
        target.view.copy_(source)
        digest.update(bytes_of(target.view))
        return
    rows = max(_BLOCK_BYTES // (target.view.shape[1] * target.dtype.itemsize), 1)
    for theirs, ours in zip(source.split(rows), target.view.split(rows), strict=True):
        ours.copy_(theirs)
        hash_boxes([Box(ours, ours.dtype)], digest)


def describe_shared(boxes: Boxes) -> tuple[dict[str, Any], np.ndarray]:
    """Move the boxes' storages into shared memory if they are not there yet; say where each box lies.

    Rows of the table: storage, first element, elements from row to row, rows, cols. Raises ValueError for a box whose
    columns are not side by side, OSError when /dev/shm has no room.
    """
    numbers: dict[tuple[int, torch.dtype], int] = {}
    storages: list[list[int]] = []
    dtypes: list[str] = []
    places: list[tuple[int, int, int]] = []
    for matrix in boxes.matrices.tensors:
        pitch, step = matrix.stride()
        if step != 1 and matrix.shape[1] > 1:
            raise ValueError(f"a matrix of shape {tuple(matrix.shape)} has strides {matrix.stride()}; expected whole rows")
        storage = matrix.untyped_storage()
        key = (storage.data_ptr(), matrix.dtype)
        if key not in numbers:
            descriptor = share(storage)
            key = (storage.data_ptr(), matrix.dtype)  # it may have moved
            numbers[key] = len(storages)
            storages.append([descriptor, os.fstat(descriptor).st_ino, storage.nbytes()])
            dtypes.append(dtype_name(matrix.dtype))
        places.append((numbers[key], matrix.storage_offset(), pitch))
    number_N, row_N, col_N, num_rows_N, num_cols_N = boxes.rows_N5.T
    storage_N, first_N, pitch_N = np.array(places, dtype=np.int64).reshape(-1, 3)[number_N].T
    table_N5 = np.stack([storage_N, first_N + row_N * pitch_N + col_N, pitch_N, num_rows_N, num_cols_N], axis=1)
    return {"kind": "shared", "pid": os.getpid(), "storages": storages, "dtypes": dtypes}, table_N5


def share(storage: torch.UntypedStorage) -> int:
    """The descriptor of the storage's shared memory; every tensor over the storage moves with it, in place."""
    with _share_lock:
        if not storage.is_shared():
            room = os.statvfs("/dev/shm")
            if room.f_bavail * room.f_frsize < storage.nbytes():
                free = room.f_bavail * room.f_frsize
                raise OSError(f"/dev/shm has {free} bytes left, {storage.nbytes()} are needed; set sync.transport=p2p")
        descriptor, _ = storage._share_fd_cpu_()
        return int(descriptor)


def map_shared(pid: int, descriptor: int, inode: int, num_bytes: int) -> torch.Tensor:
    """The bytes of another process's shared memory. Raises ValueError when it cannot be reached from here."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; trainer and engine share no memory, set sync.transport=p2p") from None
    try:
        found = os.fstat(own)
        if found.st_ino != inode or found.st_size < num_bytes:
            raise ValueError(f"{path} is not the trainer's memory any more (inode {found.st_ino}, expected {inode})")
        memory = mmap.mmap(own, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(own)
    return torch.frombuffer(memory, dtype=torch.uint8)


class CudaIpcTransport(QueuedTransport):
    """See `Transport`. Two staging buffers of a bucket each on the GPU; one is filled while the other is read."""

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        buckets = list(pieces(boxes, self._bucket_bytes))
        staging = StagingBuffers(boxes[0].view.device, max(map(total_bytes, buckets)))
        self._channel.ask({"kind": "staging", "bucket_bytes": self._bucket_bytes, **staging.describe()})
        for number, bucket in enumerate(buckets):
            if number >= NUM_BUFFERS:
                self._channel.expect()
            parts = [box.view.to(box.dtype).reshape(-1).view(torch.uint8) for box in bucket]
            values = staging.fill(number, parts)
            self._channel.send({"buffer": number % NUM_BUFFERS, "num_bytes": values.numel()})
            digest.update(bytes_of(values.cpu()))
        for _ in buckets[-NUM_BUFFERS:]:
            self._channel.expect()
        self._channel.ask({"kind": "unmap"})

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, _ = self._channel.receive()
        staging = MappedBuffers(header)
        try:
            self._channel.send({"ok": True})
            for bucket in pieces(boxes, header["bucket_bytes"]):
                message, _ = self._channel.receive()
                if message["num_bytes"] != total_bytes(bucket):
                    raise ValueError(f"bucket of {message['num_bytes']} bytes for boxes of {total_bytes(bucket)} bytes")
                unpack(staging.read(message["buffer"], message["num_bytes"]), bucket)
                staging.finish_reading()
                self._channel.send({"ok": True})
                for data in read_bytes(bucket):
                    digest.update(data)
        finally:
            staging.close()
        self._channel.receive()
        self._channel.send({"ok": True})
