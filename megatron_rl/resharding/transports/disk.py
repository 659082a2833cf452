"""Through a shared file system, for engines that only share that: sharded safetensors with a manifest, written last.

Each pair has a folder; each sync makes a new folder in it, with one file per bucket. `manifest.json` appears, complete,
when every file is on disk, so a reader sees a whole version or none. The version before is removed when the engine rank
has read the new one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rl.resharding.box_memory import bytes_of, hash_boxes
from megatron_rl.resharding.boxes import Box, pieces, total_bytes
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.digest import Digest
from megatron_rl.resharding.transports.queued import QueuedTransport

POLL_S = 0.05
APPEAR_TIMEOUT_S = 60.0
"""The longest that a shared file system may take to show what another machine wrote."""


class DiskTransport(QueuedTransport):
    """See `Transport`. The sender's `folder` is this pair's; the receiver learns the path from the sender."""

    def __init__(self, channel: Channel, bucket_bytes: int, folder: Path | None = None) -> None:
        super().__init__(channel, bucket_bytes)
        self._folder = folder

    def _send(self, boxes: Sequence[Box], digest: Digest) -> None:
        if self._folder is None:
            raise ValueError("sync.transport=disk: set sync.directory to a folder that trainers and engines share")
        self._folder.mkdir(parents=True, exist_ok=True)
        older = [path for path in self._folder.iterdir() if path.is_dir()]
        folder = self._folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            manifest = write_version(folder, boxes, self._bucket_bytes, digest)
            self._channel.ask({"kind": "manifest", "path": str(manifest)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for path in older:
            shutil.rmtree(path, ignore_errors=True)

    def _receive(self, boxes: Sequence[Box], digest: Digest) -> None:
        header, _ = self._channel.receive()
        read_version(Path(header["path"]), boxes, digest)
        self._channel.send({"ok": True})


def write_version(folder: Path, boxes: Sequence[Box], bucket_bytes: int, digest: Digest) -> Path:
    """Write the boxes, a file per bucket, then the manifest; returns its path. Holds one bucket in memory."""
    files = []
    for number, piece in enumerate(pieces(boxes, bucket_bytes)):
        path = folder / f"slices-{number:05d}.safetensors"
        tensors = {name: box.view.to(box.dtype).contiguous().cpu() for name, box in zip(names_of(piece), piece, strict=True)}
        for tensor in tensors.values():
            digest.update(bytes_of(tensor))
        save_file(tensors, path)
        _to_disk(path)
        files.append({"file": path.name, "num_bytes": total_bytes(piece)})
    temporary, manifest = folder / "manifest.tmp", folder / "manifest.json"
    description = {"bucket_bytes": bucket_bytes, "digest": digest.hexdigest(), "files": files}
    temporary.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    _to_disk(temporary)
    temporary.rename(manifest)
    _to_disk(folder)
    return manifest


def read_version(manifest: Path, boxes: Sequence[Box], digest: Digest) -> None:
    """Copy a written version into the boxes and hash them. Raises ValueError naming the file that does not fit."""
    deadline = time.monotonic() + APPEAR_TIMEOUT_S
    while not manifest.exists():
        if time.monotonic() > deadline:
            raise ValueError(f"{manifest} did not appear within {APPEAR_TIMEOUT_S:.0f} s; is sync.directory shared?")
        time.sleep(POLL_S)
    description = json.loads(manifest.read_text(encoding="utf-8"))
    parts = list(pieces(boxes, description["bucket_bytes"]))
    if [file["num_bytes"] for file in description["files"]] != [total_bytes(part) for part in parts]:
        raise ValueError(f"{manifest} describes other boxes than this engine rank's")
    for file, part in zip(description["files"], parts, strict=True):
        _read_file(manifest.parent / file["file"], part)
        hash_boxes(part, digest)


def _read_file(path: Path, boxes: Sequence[Box]) -> None:
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            for name, box in zip(names_of(boxes), boxes, strict=True):
                value = tensors.get_tensor(name)
                if value.dtype != box.dtype or value.shape != box.view.shape:
                    raise ValueError(f"{path}: '{name}' is {value.dtype} {tuple(value.shape)}, expected {box.dtype}")
                box.view.copy_(value)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error


def names_of(piece: Sequence[Box]) -> list[str]:
    """One name per box: its place in the file and its label."""
    return [f"{number:05d} {box.label}" for number, box in enumerate(piece)]


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
