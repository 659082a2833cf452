"""The directory through which the receivers inside an engine tell where they listen (see `resharding.sglang_loader`).

For an engine over several nodes it lies on a shared file system.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from megatron_rl.rollout.sglang.errors import EngineReplyError

POLL_S = 0.05
PUBLISH_TIMEOUT_S = 30.0
"""A receiver publishes before the call that opened it returns; the rest is for shared file systems to show it."""


def create_receiver_dir(path: Path, key: bytes) -> None:
    """Make the directory (mode 700) with the receivers' `key` (mode 600). Raises FileExistsError if it is there."""
    path.mkdir(mode=0o700, parents=True)
    descriptor = os.open(path / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)


def forget_receivers(path: Path) -> None:
    """Remove what an earlier engine published in the same directory."""
    for old in path.glob("receiver-*"):
        old.unlink()


def read_addresses(engine: str, path: Path, tp_size: int) -> tuple[tuple[str, int], ...]:
    """(host, port) of each tensor-parallel rank's receiver, in rank order.

    Raises EngineReplyError with the rank's own error line, or for a rank that publishes nothing.
    """
    deadline = time.monotonic() + PUBLISH_TIMEOUT_S
    files = [path / f"receiver-{rank}.json" for rank in range(tp_size)]
    while True:
        raise_reported_error(engine, path)
        missing = [file.name for file in files if not file.exists()]
        if not missing:
            break
        if time.monotonic() > deadline:
            raise EngineReplyError(f"engine {engine}: {missing[0]} did not appear in {path}")
        time.sleep(POLL_S)
    entries = [json.loads(file.read_text()) for file in files]
    return tuple((entry["host"], entry["port"]) for entry in entries)


def raise_reported_error(engine: str, path: Path) -> None:
    """Raise EngineReplyError if a rank left an error line."""
    for file in sorted(path.glob("receiver-*.error")):
        raise EngineReplyError(f"engine {engine}: {file.read_text().strip()}")
