"""The keys of a real server: needed at every door, visible nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import aiohttp
import pytest

from megatron_rl.rollout.sglang.guardian import processes_of_session

pytestmark = pytest.mark.sglang


async def status(method: str, url: str, key: str | None, body: dict | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=headers) as reply:
        return reply.status


def test_every_door_needs_its_key(running, loop):
    url, keys = running.server.url, running.keys
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    assert loop(status("POST", f"{url}/generate", None, body)) == 401
    assert loop(status("POST", f"{url}/generate", "wrong", body)) == 401
    assert loop(status("GET", f"{url}/model_info", None)) == 401
    for door in ("pause_generation", "begin_weight_update", "update_weights_from_tensor"):
        assert loop(status("POST", f"{url}/{door}", keys.api, {})) == 401, f"{door} opened with the API key"


def test_no_key_is_visible(running):
    assert stat.S_IMODE(running.key_file.stat().st_mode) == 0o600
    pids = [running.server._process.pid, *processes_of_session(running.session)]
    assert len(pids) >= 5  # guardian, server, two schedulers, detokenizer
    for pid in pids:
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert running.keys.api.encode() not in text and running.keys.admin.encode() not in text
    log = running.log_path.read_text()
    assert running.keys.api not in log and running.keys.admin not in log
    assert "'admin_api_key': '***'" in log
