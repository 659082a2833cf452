"""The HTTP client against a small real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megatron_rl.rollout.sglang import client as client_module
from megatron_rl.rollout.sglang.client import EngineClient
from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.rollout.sglang.keys import EngineKeys

DEADLINE_S = 10.0


class Connections(web.Server):
    """Answers everything, keeps connections open for a minute, and says how many are open."""

    def __init__(self) -> None:
        super().__init__(self._answer, keepalive_timeout=60.0)
        self.seen: set[object] = set()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self.seen.add(request.transport)
        if request.path == "/refused":
            return web.Response(status=400, text="no\nsuch  thing")
        return web.json_response({"authorization": request.headers["Authorization"], "path": request.path})


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Connections, EngineClient]]:
    server = Connections()
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = EngineClient("engine-7", f"http://127.0.0.1:{port}/", EngineKeys(api="user", admin="root"), lambda: None)
    try:
        yield server, client
    finally:
        await client.close()
        listener.close()
        await server.shutdown(1.0)


def test_the_right_key_goes_along() -> None:
    async def check() -> None:
        async with serving() as (_, client):
            assert await client.get("/health", DEADLINE_S) == {"authorization": "Bearer user", "path": "/health"}
            answer = await client.post("/flush", {}, DEADLINE_S, admin=True)
            assert answer["authorization"] == "Bearer root"

    asyncio.run(check())


def test_a_refusal_names_engine_and_path() -> None:
    async def check() -> None:
        async with serving() as (_, client):
            with pytest.raises(EngineReplyError, match=r"engine engine-7: /refused answered 400: no such thing"):
                await client.post("/refused", {}, DEADLINE_S)

    asyncio.run(check())


def test_an_idle_connection_is_closed_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes one first meets the next request with a reset."""
    monkeypatch.setattr(client_module, "IDLE_CONNECTION_S", 0.2)

    async def check() -> None:
        async with serving() as (server, client):
            await client.get("/first", DEADLINE_S)
            await client.get("/second", DEADLINE_S)
            assert len(server.seen) == 1, "requests in a row share a connection"
            async with asyncio.timeout(DEADLINE_S):
                while server.connections:  # the server itself would keep it for a minute
                    await asyncio.sleep(0.01)
            await client.get("/third", DEADLINE_S)
            assert len(server.seen) == 2

    asyncio.run(check())
