"""The process of `sandbox`: takes on its limits, leaves the network, and runs one program.

Started by its path under `python -I`, it imports nothing of this package. Arguments: the limits as JSON, the program.
The first process of a new process namespace waits for the program: when that ends, all that it started ends. It is a
process of ours, and so stays in the group of this one, whatever session the program opens; it ends when this one does.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1


def leave_network(libc: ctypes.CDLL) -> bool:
    """Namespaces of its own, without a network; False where the kernel refuses."""
    return libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC) == 0


def set_limits(limits: dict[str, float]) -> None:
    cpu_s = math.ceil(limits["timeout_s"]) + 1
    pairs = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: int(limits["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in pairs.items():
        resource.setrlimit(which, (most, most))


def run(path: str) -> int:
    """The program's exit code. Its exceptions are told with its own frames only."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    sys.argv = ["program.py"]
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 (told to whoever wrote it)
        frames = error.__traceback__
        traceback.print_exception(type(error), error, frames.tb_next if frames else None)
        return 1
    return 0


def wait_for(child: int) -> int:
    """Its exit code, as a shell tells it. The first process of a namespace is also the parent of those that lost theirs."""
    while True:
        ended, how = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(how)
            return code if code >= 0 else 128 - code


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever waits for the result may be killed for taking too long
    is_isolated = leave_network(libc)
    os.write(1, b"i" if is_isolated else b"b")
    if child := os.fork():
        return wait_for(child)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if child := os.fork():
        return wait_for(child)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    set_limits(json.loads(sys.argv[1]))
    code = run(sys.argv[2])
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.exit(main())
