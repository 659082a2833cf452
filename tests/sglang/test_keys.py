"""The keys of a real server: needed at every door, visible nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import aiohttp
import pytest

from megatron_rl.rollout.sglang.guardian import processes_of_session
from megatron_rl.rollout.sglang.keys import read_key_file

pytestmark = pytest.mark.sglang


async def status(method: str, url: str, key: str | None, body: dict | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=headers) as reply:
        return reply.status


def test_every_door_needs_its_key(running, loop):
    url, keys = running.server.url, read_key_file(running.work_dir / "keys.yaml")
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    assert loop(status("POST", f"{url}/generate", None, body)) == 401
    assert loop(status("POST", f"{url}/generate", "wrong", body)) == 401
    assert loop(status("GET", f"{url}/model_info", None)) == 401
    for door in ("pause_generation", "begin_weight_update", "update_weights_from_tensor"):
        assert loop(status("POST", f"{url}/{door}", keys.api, {})) == 401, f"{door} opened with the API key"


def test_no_key_is_visible(running):
    key_file = running.work_dir / "keys.yaml"
    keys = read_key_file(key_file)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600 and stat.S_IMODE(running.work_dir.stat().st_mode) == 0o700
    pids = [running.server._process.pid, *processes_of_session(running.session)]
    assert len(pids) >= 5  # guardian, server, two schedulers, detokenizer
    for pid in pids:
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert keys.api.encode() not in text and keys.admin.encode() not in text
    log = running.server.log_path.read_text()
    assert keys.api not in log and keys.admin not in log
    assert "'admin_api_key': '***'" in log
