"""The engine's phases and failures against a small HTTP server that answers as SGLang does."""

import asyncio
import base64
import json
import pickle

import pytest
from aiohttp import web

from megatron_rl.rollout.sglang import client as client_module
from megatron_rl.rollout.sglang.engine import NO_TENSORS, SglangEngine
from megatron_rl.rollout.sglang.errors import EngineDeadError, EngineReplyError
from megatron_rl.rollout.sglang.keys import EngineKeys
from megatron_rl.rollout.sglang.receiver_dir import create_receiver_dir
from megatron_rl.types.protocols import EngineDirtyError, GenerationEngine
from megatron_rl.types.rollout import GenerationRequest, SamplingParams

KEYS = EngineKeys("api-key", "admin-key")
ADMIN_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
)


class FakeSglang:
    """Records calls; sessions and versions behave as in SGLang. `refuse` names a path that answers 400."""

    def __init__(self, receiver_dir) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, dict] = {}
        self.version = "0"
        self.refuse: str | None = None
        self.hang = asyncio.Event()
        self.receiver_dir = receiver_dir
        self.rank_error: str | None = None

    async def handle(self, request: web.Request) -> web.Response:
        admin = request.path in ADMIN_PATHS
        if request.headers["Authorization"] != f"Bearer {KEYS.admin if admin else KEYS.api}":
            return web.Response(status=401)
        self.calls.append(request.path)
        if request.path == self.refuse:
            return web.json_response({"success": False, "message": "no\nroom"}, status=400)
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/generate":
            await self.hang.wait()
            return web.json_response({"output_ids": [1]})
        body = await request.json()
        self.bodies[request.path] = body
        if request.path == "/update_weights_from_tensor":
            self.version = body.get("weight_version", self.version)
            for rank in range(2):
                address = {"host": "127.0.0.1", "port": 5000 + rank, "pid": 1}
                (self.receiver_dir / f"receiver-{rank}.json").write_text(json.dumps(address))
            if self.rank_error:
                (self.receiver_dir / "receiver-1.error").write_text(self.rank_error + "\n")
        return web.json_response({"success": True})


class DeadServer:
    def raise_if_dead(self) -> None:
        raise EngineDeadError("engine e ended with exit code -9; see /logs/e.log: boom")


class LivingServer:
    def raise_if_dead(self) -> None:
        pass

    def stop(self) -> None:
        pass


def run(scenario, tmp_path, **options):
    async def main():
        create_receiver_dir(tmp_path / "receivers", b"key")
        fake = FakeSglang(tmp_path / "receivers")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", fake.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        settings = {"server": LivingServer(), "receiver_dir": tmp_path / "receivers", **options}
        engine = SglangEngine("e", f"http://127.0.0.1:{port}", KEYS, tp_size=2, request_timeout_s=5.0, **settings)
        try:
            return await scenario(engine, fake, runner)
        finally:
            await engine._client.close()
            fake.hang.set()
            await runner.cleanup()

    return asyncio.run(main())


def test_it_is_a_generation_engine(tmp_path):
    async def scenario(engine, fake, runner):
        assert isinstance(engine, GenerationEngine)
        assert await engine.policy_version() == 0

    run(scenario, tmp_path)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_weight_update(tmp_path, mode):
    async def scenario(engine, fake, runner):
        assert await engine.load_weights({"phase": "begin", "pause_mode": mode}) == 0
        with pytest.raises(EngineDirtyError, match=r"engine e: .*sync again"):
            await engine.resume()
        assert await engine.load_weights({"phase": "commit", "version": 6}) == 6
        await engine.resume()
        assert [call for call in fake.calls if call != "/model_info"] == [
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/continue_generation",
        ]
        update = fake.bodies["/update_weights_from_tensor"]
        assert fake.bodies["/pause_generation"] == {"mode": mode}
        assert update["weight_version"] == "6" and update["flush_cache"] is (mode != "in_place")
        assert update["serialized_named_tensors"] == [NO_TENSORS] * 2
        assert pickle.loads(base64.b64decode(NO_TENSORS)) == []

    run(scenario, tmp_path)


def test_an_engine_that_is_paused_is_not_paused_again(tmp_path):
    async def scenario(engine, fake, runner):
        await engine.pause("in_place")
        await engine.load_weights({"phase": "begin", "pause_mode": "retract"})
        await engine.load_weights({"phase": "commit", "version": 2})
        assert fake.calls.count("/pause_generation") == 1
        assert fake.bodies["/update_weights_from_tensor"]["flush_cache"] is False

    run(scenario, tmp_path)


@pytest.mark.parametrize("failing", ["/update_weights_from_tensor", "/end_weight_update"])
def test_a_commit_that_fails_leaves_it_dirty_until_one_succeeds(tmp_path, failing):
    async def scenario(engine, fake, runner):
        await engine.load_weights({"phase": "begin", "pause_mode": "retract"})
        fake.refuse = failing
        with pytest.raises(EngineReplyError, match=f"^engine e: {failing} answered 400: .*no.*room.*$"):
            await engine.load_weights({"phase": "commit", "version": 3})
        with pytest.raises(EngineDirtyError):
            await engine.resume()
        fake.refuse = None
        await engine.load_weights({"phase": "begin"})
        assert fake.calls.count("/end_weight_update") == (1 if failing != "/end_weight_update" else 2)
        await engine.load_weights({"phase": "commit", "version": 4})
        await engine.resume()

    run(scenario, tmp_path)


def test_a_rank_that_reports_an_error_fails_the_commit(tmp_path):
    async def scenario(engine, fake, runner):
        await engine.load_weights({"phase": "begin", "pause_mode": "retract"})
        fake.rank_error = "TP rank 1: RuntimeError: shapes"
        with pytest.raises(EngineReplyError, match="engine e: TP rank 1: RuntimeError: shapes"):
            await engine.load_weights({"phase": "commit", "version": 3})
        with pytest.raises(EngineDirtyError):
            await engine.resume()

    run(scenario, tmp_path)


def test_abandon_without_begin_changes_nothing_and_unknown_phases_are_refused(tmp_path):
    async def scenario(engine, fake, runner):
        assert await engine.load_weights({"phase": "abandon"}) == 0
        assert fake.calls == ["/model_info"]
        with pytest.raises(ValueError, match="phase 'finish'"):
            await engine.load_weights({"phase": "finish"})
        with pytest.raises(ValueError, match="pause mode 'hard'"):
            await engine.pause("hard")

    run(scenario, tmp_path)


def test_receivers_are_opened_in_a_session_and_stale_ones_are_forgotten(tmp_path):
    async def scenario(engine, fake, runner):
        (fake.receiver_dir / "receiver-7.error").write_text("from an earlier engine\n")
        assert await engine.open_receivers() == (("127.0.0.1", 5000), ("127.0.0.1", 5001))
        assert fake.calls == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
        assert "weight_version" not in fake.bodies["/update_weights_from_tensor"]

    run(scenario, tmp_path)


REQUEST = GenerationRequest("r", (1, 2), SamplingParams(max_new_tokens=3), 0)


def test_a_request_to_a_server_that_died_ends_though_the_connection_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "WATCH_S", 0.02)

    async def scenario(engine, fake, runner):
        with pytest.raises(EngineDeadError, match=r"/logs/e\.log: boom"):
            await asyncio.wait_for(engine.generate(REQUEST), 2.0)

    run(scenario, tmp_path, server=DeadServer())


def test_a_request_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "WATCH_S", 0.02)

    async def scenario(engine, fake, runner):
        engine._request_timeout_s = 0.1
        with pytest.raises(TimeoutError, match="engine e: no answer to /generate"):
            await engine.generate(REQUEST)

    run(scenario, tmp_path)


def test_a_closed_connection_is_a_dead_engine(tmp_path):
    """An attached engine has no process to ask: a broken connection is all there is to see."""

    async def scenario(engine, fake, runner):
        await runner.cleanup()
        with pytest.raises(EngineDeadError, match=r"engine e: http://127\.0\.0\.1.* broke off at /generate"):
            await engine.generate(REQUEST)

    run(scenario, tmp_path, server=None)


def test_a_malformed_answer_is_refused(tmp_path):
    async def scenario(engine, fake, runner):
        fake.hang.set()
        with pytest.raises(EngineReplyError, match="engine e: the reply has no meta_info"):
            await engine.generate(REQUEST)

    run(scenario, tmp_path)


def test_without_a_receiver_directory_no_weights_are_taken(tmp_path):
    async def scenario(engine, fake, runner):
        with pytest.raises(ValueError, match="engine e: no receiver directory"):
            await engine.open_receivers()

    run(scenario, tmp_path, receiver_dir=None)
