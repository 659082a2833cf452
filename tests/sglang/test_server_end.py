"""A rank of the shared server dies. Runs last (see conftest)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from megatron_rl.rollout.sglang.errors import EngineDeadError
from megatron_rl.rollout.sglang.guardian import SHM_DIR, processes_of_session
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

pytestmark = pytest.mark.sglang


def pid_of_rank(session: int, rank: int) -> int:
    title = f"sglang::scheduler_TP{rank}".encode()
    (pid,) = [p for p in processes_of_session(session) if Path(f"/proc/{p}/cmdline").read_bytes().startswith(title)]
    return pid


def shared_memory_of(session: int) -> set[Path]:
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes_of_session(session))
    return {path for path in SHM_DIR.glob("sgl*") if str(path) in maps}


def test_a_killed_rank_ends_requests_within_seconds_and_leaves_nothing(running, loop):
    session, work_dir = running.session, running.work_dir
    host, port = running.server.url.removeprefix("http://").split(":")
    shared_memory = shared_memory_of(session)
    assert shared_memory

    async def scenario() -> float:
        request = GenerationRequest("doomed", (4, 5, 6), SamplingParams(max_new_tokens=400), seed=1)
        doomed = asyncio.ensure_future(running.engine.generate(request))
        await asyncio.sleep(0)  # let the request leave
        os.kill(pid_of_rank(session, 1), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"^engine shared[ :]") as caught:
            await asyncio.wait_for(doomed, 30.0)
        assert "\n" not in str(caught.value)
        return time.monotonic() - begin

    assert loop(scenario()) < 10.0
    running.server.stop()
    with pytest.raises(EngineDeadError, match=f"engine shared ended with exit code .*{running.server.log_path}"):
        running.server.raise_if_dead()
    assert processes_of_session(session) == []
    assert not work_dir.exists()
    assert not [path for path in shared_memory if path.exists()]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
