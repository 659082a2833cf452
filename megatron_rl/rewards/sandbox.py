"""Runs a program that a model wrote: a child process with limits on time, memory and output, and no network.

What it is: resource limits, an empty environment, a folder of its own, and, where the kernel lets users have namespaces,
no network and no process that outlives it. What it is not: a jail for files. The program reads what this user may read;
keep secrets elsewhere, or run the whole container without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
FLOOD_BYTES = 64 * 1024**2
"""A program that has written this much is ended."""
CHUNK_BYTES = 65536
END_TIMEOUT_S, END_POLL_S = 2.0, 0.005
ISOLATED = b"i"
"""The first byte that the child writes when it has namespaces of its own."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    timeout_s: float = 5.0
    """Wall clock, with the start of the interpreter."""
    memory_bytes: int = 1024**3
    """Address space."""
    output_bytes: int = 16 * 1024
    """What is kept of standard output and error; the rest is counted."""
    file_bytes: int = 16 * 1024**2
    """The largest file that it may write, in a folder that goes with it."""

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.memory_bytes, self.output_bytes, self.file_bytes) <= 0:
            raise ValueError(f"limits of a sandbox must be above 0: {self}")


class ProgramStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"  # an exception, or an exit code
    KILLED = "killed"  # by the kernel: CPU time, a crash
    TIMEOUT = "timeout"
    FLOODED = "flooded"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """`output` is standard output and error as they came, cut after `output_bytes` of the `num_output_bytes` written.
    `is_isolated`: it had no network."""

    status: ProgramStatus
    output: str
    num_output_bytes: int
    is_truncated: bool
    is_isolated: bool


def run_program(source: str, stdin: str = "", limits: SandboxLimits | None = None) -> ProgramResult:
    """Run Python source to its end or its limits; leaves no process and no file behind. Blocks at most `timeout_s`,
    and the moment in which what it started ends."""
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        program, given = Path(folder, "program.py"), Path(folder, "stdin")
        program.write_text(source, encoding="utf-8", errors="replace")
        given.write_text(stdin, encoding="utf-8", errors="replace")
        with given.open("rb") as stdin_file:
            process = subprocess.Popen(
                [sys.executable, "-I", str(CHILD), json.dumps(asdict(limits)), str(program)],
                stdin=stdin_file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            return _read(process, limits)
        finally:
            _end(process)


def _read(process: subprocess.Popen[bytes], limits: SandboxLimits) -> ProgramResult:
    assert process.stdout is not None
    deadline = time.monotonic() + limits.timeout_s
    kept, num_bytes = b"", 0
    status: ProgramStatus | None = None
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                status = ProgramStatus.TIMEOUT
            elif num_bytes > FLOOD_BYTES:
                status = ProgramStatus.FLOODED
            elif selector.select(left_s):
                chunk = os.read(process.stdout.fileno(), CHUNK_BYTES)
                if not chunk:
                    status = _ended(process, max(deadline - time.monotonic(), 0.0))
                num_bytes += len(chunk)
                kept += chunk[: max(limits.output_bytes + 1 - len(kept), 0)]
    text = kept[1:].decode("utf-8", errors="ignore")
    num_output = max(num_bytes - 1, 0)
    return ProgramResult(status, text, num_output, num_output > limits.output_bytes, kept[:1] == ISOLATED)


def _ended(process: subprocess.Popen[bytes], left_s: float) -> ProgramStatus:
    """Its output is closed: how it ended."""
    try:
        code = process.wait(left_s)
    except subprocess.TimeoutExpired:
        return ProgramStatus.TIMEOUT
    if code == 0:
        return ProgramStatus.OK
    return ProgramStatus.KILLED if code < 0 or code > 128 else ProgramStatus.FAILED


def _end(process: subprocess.Popen[bytes]) -> None:
    """The child is the leader of its group; the first process of its namespace is in the group too.

    That one ends after all others of the namespace, and is waited for: on a busy machine it outlives the leader for a moment.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + END_TIMEOUT_S
        while _runs(process.pid) and time.monotonic() < deadline:
            time.sleep(END_POLL_S)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _runs(group: int) -> bool:
    """Whether a process of this group has not ended. One that has waits for the machine's first process to take note of it,
    which may be slow, or never do so in a container."""
    os.killpg(group, 0)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
