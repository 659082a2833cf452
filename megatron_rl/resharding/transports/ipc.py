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

from megatron_rl.resharding.boxes import (
    Box,
    bytes_of,
    dtype_name,
    dtype_of,
    hash_boxes,
    pieces,
    read_bytes,
    total_bytes,
    unpack,
)
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.cuda_ipc import MappedBuffers, StagingBuffers
from megatron_rl.resharding.digest import Digest
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
        header, table = describe_shared(boxes)
        self._channel.send(header, memoryview(table.tobytes()))
        hash_boxes(boxes, digest)
        self._channel.expect()  # until then the engine rank reads here

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, payload = self._channel.receive()
        sources = self._open(header, np.frombuffer(payload, dtype=np.int64).reshape(-1, 5))
        if len(sources) != len(boxes):
            raise ValueError(f"{len(sources)} shared boxes for {len(boxes)} boxes here")
        for source, target in zip(sources, boxes, strict=True):
            if source.shape != target.view.shape:
                raise ValueError(f"a shared box {tuple(source.shape)} for a box {tuple(target.view.shape)} here")
            rows = max(_BLOCK_BYTES // (target.view.shape[1] * target.dtype.itemsize), 1)
            for first in range(0, len(source), rows):
                ours = target.view[first : first + rows]
                copy_box(source[first : first + rows], ours)
                hash_boxes([Box(ours, ours.dtype)], digest)
        self._channel.send({"ok": True})

    def _open(self, header: dict[str, Any], table_N5: np.ndarray) -> list[torch.Tensor]:
        """The trainer's boxes as views of its memory. Raises ValueError when they do not lie in it."""
        keys: list[_SharedKey] = [(header["pid"], fd, inode, num_bytes) for fd, inode, num_bytes in header["storages"]]
        mapped = {key: self._mapped[key] if key in self._mapped else map_shared(*key) for key in keys}
        self._mapped = mapped
        storages = [mapped[key].view(dtype_of(name)) for key, name in zip(keys, header["dtypes"], strict=True)]
        boxes = []
        for number, offset, row_stride, num_rows, num_cols in table_N5.tolist():
            storage = storages[number]
            last = offset + (num_rows - 1) * row_stride + num_cols
            if min(offset, row_stride, num_rows, num_cols) < 0 or last > storage.numel():
                raise ValueError(f"a shared box ends at element {last} of {storage.numel()}")
            boxes.append(storage.as_strided((num_rows, num_cols), (row_stride, 1), offset))
        return boxes


def copy_box(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target.copy_(source)`; the C library's copy where no cast and no stride is in the way is a fifth faster."""
    if source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        target.copy_(source)


def describe_shared(boxes: Sequence[Box]) -> tuple[dict[str, Any], np.ndarray]:
    """Move the boxes' storages into shared memory if they are not there yet; say where each box lies.

    Rows of the table: storage, first element, elements from row to row, rows, cols. Raises ValueError for a box whose
    columns are not side by side, OSError when /dev/shm has no room.
    """
    numbers: dict[tuple[int, torch.dtype], int] = {}
    storages: list[list[int]] = []
    dtypes: list[str] = []
    table: list[tuple[int, ...]] = []
    for view, _, _ in boxes:
        (num_rows, num_cols), (pitch, step) = view.shape, view.stride()
        if step != 1 and num_cols > 1:
            raise ValueError(f"a box of shape {tuple(view.shape)} has strides {view.stride()}; expected whole rows")
        storage = view.untyped_storage()
        key = (storage.data_ptr(), view.dtype)
        if key not in numbers:
            descriptor = share(storage)
            key = (storage.data_ptr(), view.dtype)  # it may have moved
            numbers[key] = len(storages)
            storages.append([descriptor, os.fstat(descriptor).st_ino, storage.nbytes()])
            dtypes.append(dtype_name(view.dtype))
        table.append((numbers[key], view.storage_offset(), pitch, num_rows, num_cols))
    header = {"kind": "shared", "pid": os.getpid(), "storages": storages, "dtypes": dtypes}
    return header, np.array(table, dtype=np.int64)


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
            values = staging.fill(number % NUM_BUFFERS, parts)
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
