"""Runs a function in real processes that talk over gloo: one process per rank, a deadline, and the traceback of who failed.

    results = run_distributed(walk_layouts, world_size=2, timeout_s=120, family="llama")

calls `walk_layouts(Rank(rank, world_size, port), family="llama")` in each process and returns its JSON-able results in rank
order. The function must stand at the top level of its file.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """Which process this is and where rank 0 listens."""

    rank: int
    world_size: int
    port: int


def run_distributed(function: Callable[..., Any], world_size: int, *, timeout_s: float, **kwargs: Any) -> list[Any]:
    """The results of `function(Rank, **kwargs)` on every rank. Raises AssertionError with the first failing rank's output."""
    source = inspect.getsourcefile(function)
    assert source is not None
    port = _free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",  # Megatron warns about every absent GPU package
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                call = {**asdict(Rank(rank, world_size, port)), "file": source, "name": function.__name__, "kwargs": kwargs}
                Path(folder, f"call_{rank}.json").write_text(json.dumps(call))
                with open(Path(folder, f"output_{rank}.txt"), "wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, __file__, folder, str(rank)],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=environment,
                        )
                    )
            _wait(processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [json.loads(Path(folder, f"result_{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                code = process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if code:
                raise AssertionError(f"rank {rank} failed (exit {code}):\n{_output(folder, rank)}")
        if waiting and time.monotonic() > deadline:
            outputs = "\n".join(f"--- rank {rank}\n{_output(folder, rank)}" for rank in sorted(waiting))
            raise AssertionError(f"ranks {sorted(waiting)} did not end within {timeout_s:.0f} s:\n{outputs}")


def _output(folder: Path, rank: int) -> str:
    return Path(folder, f"output_{rank}.txt").read_text(errors="replace")[-6000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(folder: str, rank: str) -> int:
    call = json.loads(Path(folder, f"call_{rank}.json").read_text())
    sys.path.insert(0, str(Path(call["file"]).parent))
    spec = importlib.util.spec_from_file_location("distributed_function", call["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distributed_function"] = module
    try:
        spec.loader.exec_module(module)
        me = module.Rank(call["rank"], call["world_size"], call["port"])
        result = getattr(module, call["name"])(me, **call["kwargs"])
        Path(folder, f"result_{rank}.json").write_text(json.dumps(result))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must see it
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a rank that failed must not wait for the others in a destructor
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
