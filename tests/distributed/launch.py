"""Runs a function in real processes that talk over gloo: one process per rank, a deadline, and the output of who failed.

    results = run_distributed(walk_layouts, world_size=2, timeout_s=120, family="llama")

calls `walk_layouts(Rank(rank, world_size, port), family="llama")` in each process and returns its JSON-able results in rank
order. The function must stand at the top level of its module.

Ranks are forks of one process (`nursery`) that has imported torch and Megatron and lives as long as the tests do, with the
environment of the first call: importing them anew in every rank would cost more than most tests.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

GRACE_S = 120.0
"""What the nursery may take beyond the ranks' own deadline: its imports, and ending who is late."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which process this is and where rank 0 listens."""

    rank: int
    world_size: int
    port: int


def run_distributed(function: Callable[..., Any], world_size: int, *, timeout_s: float, **kwargs: Any) -> list[Any]:
    """The results of `function(Rank, **kwargs)` on every rank. Raises AssertionError with the first failing rank's output."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            call = {"me": asdict(Rank(rank, world_size, port)), "module": function.__module__, "name": function.__name__}
            Path(folder, f"call_{rank}.json").write_text(json.dumps(call | {"kwargs": kwargs}))
        reply = _ask({"folder": folder, "world_size": world_size, "timeout_s": timeout_s}, timeout_s + GRACE_S)
        if reply["failed"] is not None:
            rank, status = reply["failed"]
            raise AssertionError(f"rank {rank} failed (exit {status}):\n{_output(folder, rank)}")
        if reply["late"]:
            outputs = "\n".join(f"--- rank {rank}\n{_output(folder, rank)}" for rank in reply["late"])
            raise AssertionError(f"ranks {reply['late']} did not end within {timeout_s:.0f} s:\n{outputs}")
        print(f"{function.__name__} on {world_size} ranks: {reply['cpu_s']:.1f} s of CPU")
        return [json.loads(Path(folder, f"result_{rank}.json").read_text()) for rank in range(world_size)]


def _ask(order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The nursery's answer to one order. A nursery that died or is late is forgotten, so that the next test has a new one."""
    if _nursery().poll() is not None:
        _nursery.cache_clear()
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(json.dumps(order).encode() + b"\n")
    nursery.stdin.flush()
    readable, _, _ = select.select([nursery.stdout], [], [], timeout_s)
    if line := nursery.stdout.readline() if readable else b"":
        return dict(json.loads(line))
    nursery.kill()
    _nursery.cache_clear()
    raise AssertionError(f"the process that forks ranks gave no answer within {timeout_s:.0f} s (exit {nursery.wait()})")


@cache
def _nursery() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",  # Megatron warns about every absent GPU package
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.distributed.nursery"]
    nursery = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root)

    def close() -> None:
        assert nursery.stdin is not None
        nursery.stdin.close()
        nursery.wait()

    atexit.register(close)
    return nursery


def _output(folder: str, rank: int) -> str:
    return Path(folder, f"output_{rank}.txt").read_text(errors="replace")[-6000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
