"""One SGLang server process (with its children): start, wait until it serves, watch, stop."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_rl.rollout.sglang import guardian
from megatron_rl.rollout.sglang.errors import EngineDeadError
from megatron_rl.rollout.sglang.keys import EngineKeys
from megatron_rl.rollout.sglang.launch_args import ServerLaunch

POLL_S = 0.2
HEALTH_TIMEOUT_S = 30.0
"""A healthy idle server answers /health after it has sampled one token, in one to two seconds."""
LOG_TAIL_LINES = 20
STOP_GRACE_S = 10.0
"""From SIGTERM (SGLang drains and ends) to SIGKILL."""


def free_port(host: str) -> int:
    """A TCP port that is free on `host` now, and likely still is when a server binds it half a minute later.

    It lies below the ports that the system gives to outgoing connections and above those of Ray's workers.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(20_000, max(first_ephemeral, 20_100)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no free port on {host} between 20000 and {first_ephemeral}")


def make_work_dir() -> Path:
    """A private directory (mode 700) with a short path: SGLang puts Unix sockets into it, whose paths are limited."""
    return Path(tempfile.mkdtemp(prefix="mrl-sglang-"))


def remove_work_dir(path: Path) -> None:
    """For a directory that no server took over; a server's guardian removes its own."""
    shutil.rmtree(path, ignore_errors=True)


def log_tail(log_path: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines that say something, in one line."""
    try:
        lines = log_path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return " | ".join(line.strip() for line in lines[-num_lines:] if line.strip()) or "(empty log)"


class SglangServer:
    """A started server. Use `start`; always `stop` (also after a failure), which leaves no process, port or file.

    The server also ends when this process does, however that happens (see `guardian`). `work_dir` (from
    `make_work_dir`) is its TMPDIR and is removed at the end; the key file may live in it.
    """

    def __init__(self, name: str, launch: ServerLaunch, log_path: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.log_path = log_path
        self.url = f"http://{launch.host}:{launch.port}"
        self._process = process

    @classmethod
    def start(cls, name: str, launch: ServerLaunch, keys: EngineKeys, work_dir: Path, log_path: Path) -> SglangServer:
        """Start the process and return at once; `wait_ready` tells when it serves."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        secrets_read, secrets_write = os.pipe()
        os.write(secrets_write, f"{keys.api}\n{keys.admin}".encode())
        os.close(secrets_write)
        # -I and -S: the guardian is standard library only; the CPU layer and site-packages are the server's.
        command = [sys.executable, "-I", "-S", guardian.__file__, str(work_dir), str(secrets_read), str(STOP_GRACE_S)]
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    [*command, *launch.argv],
                    env=_server_environment(launch.env, work_dir),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(secrets_read,),
                    start_new_session=True,
                )
        finally:
            os.close(secrets_read)
        return cls(name, launch, log_path, process)

    def wait_ready(self, deadline_s: float, on_progress: Callable[[str], None] = lambda line: None) -> float:
        """Wait until /health answers 200; returns the seconds it took. `on_progress` gets the log's newest line.

        Raises EngineDeadError (it ended) or TimeoutError, each in one line with the end of the log.
        """
        begin = time.monotonic()
        last_line = ""
        while not self._is_healthy():
            self.raise_if_dead()
            waited = time.monotonic() - begin
            if waited > deadline_s:
                raise TimeoutError(
                    f"engine {self.name}: not serving after {deadline_s:.0f} s; raise rollout.sglang.start_timeout_s "
                    f"or see {self.log_path}: {log_tail(self.log_path, 3)}"
                )
            line = log_tail(self.log_path, 1)
            if line != last_line:
                on_progress(f"engine {self.name}: {waited:.0f} s: {line[:160]}")
                last_line = line
            time.sleep(POLL_S)
        return time.monotonic() - begin

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the end of the log if the server has ended. Costs one waitpid."""
        code = self._process.poll()
        if code is not None:
            raise EngineDeadError(
                f"engine {self.name} ended with exit code {code}; see {self.log_path}: {log_tail(self.log_path)}"
            )

    def stop(self) -> None:
        """End the server and all its children; SIGTERM first, SIGKILL after a grace. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_GRACE_S + 10.0)
        except subprocess.TimeoutExpired as error:
            self._process.kill()  # the server dies with its guardian
            self._process.wait()
            raise TimeoutError(f"engine {self.name}: its guardian did not end; see {self.log_path}") from error

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S) as reply:
                return reply.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def _server_environment(added: Mapping[str, str], work_dir: Path) -> dict[str, str]:
    """This process's environment with `added` on top; PYTHONPATH is put in front of what is there."""
    env = {**os.environ, **added, "TMPDIR": str(work_dir)}
    if "PYTHONPATH" in added and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join((added["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return env
