"""Whole experiments as a person starts them: a subprocess of the command line, watched and cleaned up after."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "MEGATRON_RL_TEST_RUN"


class Run:
    """`megatron-rl train` in a process of its own; every process that it starts inherits a mark by which it is found."""

    def __init__(self, directory: Path, config: str, *overrides: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.shm_before = set(os.listdir("/dev/shm"))
        command = [
            sys.executable, "-m", "megatron_rl.cli.main", "train", str(ROOT / config),
            f"run.directory={directory}", *overrides,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(env or {}), MARK: self.mark},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.output = ""
        self._chunks: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Until `text` has been printed. Fails when the run ends or the time is over first."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            self._take(deadline, f"'{text}' was not printed")

    def wait(self, timeout_s: float) -> int:
        """The exit status."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError):
            while True:
                self._take(deadline, "the run did not end")
        return self.process.wait(timeout=max(deadline - time.monotonic(), 1.0))

    def metrics(self) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self) -> dict[int, str]:
        """Pid and command line of every living process of this run."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it ended while we looked
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if command:
                        found[int(entry.name)] = command
        return found

    def check_nothing_left(self, timeout_s: float = 20.0) -> None:
        """No process of the run lives, and no shared-memory file is new. Ports end with their processes."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"processes left: {left}"
        new = {name for name in os.listdir("/dev/shm") if name not in self.shm_before and "megatron" in name.lower()}
        plasma = {name for name in os.listdir("/dev/shm") if name.startswith("plasma") and name not in self.shm_before}
        assert not new | plasma, f"shared-memory files left: {new | plasma}"

    def kill_process(self, pid: int) -> None:
        """SIGKILL one process of this run."""
        assert pid in self.processes(), f"{pid} is none of this run's"
        os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """End whatever is left; for a test that failed."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(timeout=10.0)

    def _read(self) -> None:
        assert self.process.stderr is not None
        while chunk := os.read(self.process.stderr.fileno(), 65536):
            self._chunks.put(chunk.decode(errors="replace"))
        self._chunks.put(None)

    def _take(self, deadline: float, complaint: str) -> None:
        try:
            chunk = self._chunks.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise AssertionError(f"{complaint} in time; output:\n{self.output[-4000:]}") from None
        if chunk is None:
            if complaint.startswith("'"):
                raise AssertionError(f"{complaint} before the run ended; output:\n{self.output[-4000:]}")
            raise EOFError
        self.output += chunk


@contextlib.contextmanager
def running(directory: Path, config: str, *overrides: str, env: dict[str, str] | None = None):
    run = Run(directory, config, *overrides, env=env)
    try:
        yield run
    finally:
        run.kill()
