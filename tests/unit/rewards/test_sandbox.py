"""Programs that behave, hang, crash, flood, fork and want the network."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_rl.rewards.sandbox import ProgramStatus, SandboxLimits, run_program

LIMITS = SandboxLimits(timeout_s=20.0, memory_bytes=512 * 1024**2, output_bytes=1000)


def test_a_program_reads_and_writes():
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nprint('é', file=sys.stderr)"
    result = run_program(program, "1 2 39", LIMITS)
    assert result.status is ProgramStatus.OK and not result.is_truncated
    assert sorted(result.output.split()) == ["42", "é"] and result.num_output_bytes == 6


def test_an_exception_is_told_with_the_program_s_own_frames():
    result = run_program("def f():\n    return 1 / 0\nf()", limits=LIMITS)
    assert result.status is ProgramStatus.FAILED and "ZeroDivisionError: division by zero" in result.output
    assert 'File "program.py", line 3' in result.output and "sandbox_child" not in result.output
    assert run_program("raise SystemExit(3)", limits=LIMITS).status is ProgramStatus.FAILED
    assert run_program("raise SystemExit", limits=LIMITS).status is ProgramStatus.OK
    assert "SyntaxError" in run_program("1 +", limits=LIMITS).output


@pytest.mark.parametrize("program", ["while 1: pass", "import os; os.close(1); os.close(2)\nwhile 1: pass"])
def test_one_that_hangs_is_ended(program):
    started = time.monotonic()
    assert run_program(program, limits=SandboxLimits(timeout_s=1.5)).status is ProgramStatus.TIMEOUT
    assert time.monotonic() - started < 15


def test_memory_files_and_output_are_limited():
    assert "MemoryError" in run_program("bytearray(1 << 32)", limits=LIMITS).output
    assert "OSError" in run_program("open('f', 'wb').write(b'x' * (32 << 20))", limits=LIMITS).output
    result = run_program("print('x' * (1 << 20))", limits=LIMITS)
    assert result.status is ProgramStatus.OK
    assert result.output == "x" * 1000 and result.is_truncated and result.num_output_bytes == (1 << 20) + 1
    flood = "import sys\nwhile True: sys.stdout.write('x' * (1 << 20))"
    assert run_program(flood, limits=LIMITS).status is ProgramStatus.FLOODED


def test_a_crash_is_told():
    assert run_program("import ctypes; ctypes.string_at(0)", limits=LIMITS).status is ProgramStatus.KILLED


def test_it_sees_no_environment_and_no_network_and_leaves_nothing(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    program = """
import os, socket
print("SECRET_KEY" in os.environ, os.getcwd(), flush=True)
open("left", "w").write("x")
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=5)
    print("connected", flush=True)
except OSError as error:
    print("refused", flush=True)
try:
    print("child", os.fork())
    os.setsid()
    import time
    time.sleep(600)
except OSError:
    print("no child")
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run_program(program.replace("PORT", str(server.getsockname()[1])), limits=SandboxLimits(timeout_s=3.0))
    first = result.output.split()
    assert first[0] == "False" and not Path(first[1]).exists()
    if result.is_isolated:
        assert "refused" in first
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                assert first[1] not in (entry / "cmdline").read_text()
            except OSError:
                continue


def test_limits_are_positive():
    with pytest.raises(ValueError, match="must be above 0"):
        SandboxLimits(timeout_s=0)
