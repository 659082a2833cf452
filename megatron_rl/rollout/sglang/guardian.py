"""Stands between us and one server: starts it, ends all of it when we end, and leaves nothing behind.

Run as a script, standard library only: `guardian.py WORK_DIR SECRETS_FD GRACE_S COMMAND...`. Its standard input is a
pipe that the owner holds open; end of file, however it comes about (stop, crash, SIGKILL of the owner), means "stop".
PR_SET_PDEATHSIG alone would not do: it follows the thread that forked, and SGLang's children are not ours.

The server's output goes to standard output line by line with the secrets blotted out, since SGLang logs its keys.
When the server has ended, for whatever reason, every process that descends from it is killed, WORK_DIR (its TMPDIR) is
removed and shared-memory files of SGLang that nobody maps any more are unlinked. The exit code is the server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The pipe alone tells the guardian when to stop; the server gets the default handlers back."""
POLL_S = 0.1
SHM_DIR = Path("/dev/shm")
SHM_PREFIXES = ("sgl_shm_mq_", "sglang_loads_")
"""Names that SGLang 0.5.23 gives its shared memory; killed processes leave them behind."""


def processes_of_session(session: int) -> list[int]:
    """Living processes (no zombies) whose session is `session`."""
    return [pid for pid, _, found in living_processes() if found == session]


def living_processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of each process that is no zombie."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
                continue
            if fields[0] != "Z":
                yield int(entry), int(fields[1]), int(fields[3])


def end_descendants(session: int, deadline_s: float) -> None:
    """SIGKILL what is left of the server's session and whatever else has become this process's child, until there is none
    or the deadline passes. One sweep would not do: a process that is just being forked is not listed yet."""
    end = time.monotonic() + deadline_s
    while True:
        for pid, parent, found in living_processes():
            if found == session or parent == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not has_children() or time.monotonic() > end:
            return
        time.sleep(POLL_S)


def has_children() -> bool:
    """Whether this process has any child that has not ended; those that have are reaped."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def unlink_orphaned_shared_memory(since: float) -> None:
    """Unlink SGLang's shared-memory files of this user, made after `since` (Unix time), that no process maps."""
    candidates = [
        path
        for path in SHM_DIR.glob("sgl*")
        if path.name.startswith(SHM_PREFIXES) and path.stat().st_uid == os.getuid() and path.stat().st_mtime >= since
    ]
    if not candidates:
        return
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += maps.read_text()
        except OSError:  # another user's process, or one that ended
            continue
    for path in candidates:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def copy_output(source: int, secrets: list[bytes], rest: bytes) -> bytes | None:
    """Copy what is there to standard output, blotted out; returns the unfinished line, None at end of file."""
    chunk = os.read(source, 65536)
    *lines, rest_of_line = (rest + chunk).split(b"\n")
    text = b"".join(line + b"\n" for line in lines) if chunk else rest
    for secret in secrets:
        text = text.replace(secret, b"***")
    while text:
        text = text[os.write(1, text) :]
    return rest_of_line if chunk else None


def guard(secrets: list[bytes], grace_s: float, command: list[str]) -> int:
    """Run `command` to its end, or until standard input ends; returns its exit code (negative: a signal)."""
    libc = ctypes.CDLL(None)

    def prepare_server() -> None:
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what outlives its parent down there becomes our child
    started = time.time()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare_server,
    )
    assert server.stdout is not None
    output = server.stdout.fileno()
    poller = select.poll()
    for descriptor in (0, output):
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
    rest: bytes | None = b""
    kill_at: float | None = None
    while server.poll() is None:
        ready = [descriptor for descriptor, _ in poller.poll(POLL_S * 1000)]
        if output in ready and rest is not None:
            rest = copy_output(output, secrets, rest)
            if rest is None:
                poller.unregister(output)
        if 0 in ready and not os.read(0, 4096):
            poller.unregister(0)
            kill_at = time.monotonic() + grace_s
            server.terminate()
        if kill_at is not None and time.monotonic() > kill_at:
            break
    server.kill()
    server.wait()
    end_descendants(server.pid, deadline_s=5.0)
    while rest is not None and select.select([output], [], [], 1.0)[0]:  # it ends with the last writer
        rest = copy_output(output, secrets, rest)
    unlink_orphaned_shared_memory(started)
    return server.returncode


def main() -> int:
    work_dir, secrets_fd, grace_s, *command = sys.argv[1:]
    with os.fdopen(int(secrets_fd), "rb") as file:
        secrets = [line for line in file.read().split(b"\n") if line]
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        return guard(secrets, float(grace_s), command)
    except OSError as error:  # the interpreter is not there, or cannot be run
        os.write(1, f"cannot start {command[0]}: {error}\n".encode())
        return 127
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
