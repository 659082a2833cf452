"""HTTP to one SGLang server: keys, deadlines, and errors that name the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from megatron_rl.rollout.sglang.errors import EngineDeadError, EngineReplyError
from megatron_rl.rollout.sglang.keys import EngineKeys

WATCH_S = 0.5
"""How often a waiting request looks whether its server still lives."""
IDLE_CONNECTION_S = 1.0
"""How long an unused connection is kept. The server closes one after `SGLANG_TIMEOUT_KEEP_ALIVE` (5 s); a request that it
meets on its way then fails. So the client must be the first, by far: on a busy machine a second is nothing.
"""


class EngineClient:
    """JSON over HTTP. Requests use the API key; `admin` requests the admin key.

    `raise_if_dead` is asked while a request waits and when a connection breaks; it raises EngineDeadError if the server
    is known to have ended.
    """

    def __init__(self, engine: str, url: str, keys: EngineKeys, raise_if_dead: Callable[[], None]) -> None:
        self._engine = engine
        self._url = url.rstrip("/")
        self._keys = keys
        self._raise_if_dead = raise_if_dead
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float) -> Any:
        return await self._watched("GET", path, None, self._keys.api, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float, *, admin: bool = False) -> Any:
        """The decoded answer, None if it is empty or no JSON.

        Raises EngineDeadError, EngineReplyError (status other than 200) or TimeoutError.
        """
        return await self._watched("POST", path, body, self._keys.admin if admin else self._keys.api, timeout_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _watched(self, method: str, path: str, body: Any, key: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        request = asyncio.ensure_future(self._request(method, path, body, key))
        try:
            while not request.done():
                await asyncio.wait({request}, timeout=WATCH_S)
                if not request.done():
                    self._raise_if_dead()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"engine {self._engine}: no answer to {path} within {timeout_s:.0f} s")
            return await request
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            self._raise_if_dead()
            raise EngineDeadError(f"engine {self._engine}: {self._url} broke off at {path}: {error}") from error
        finally:
            request.cancel()

    async def _request(self, method: str, path: str, body: Any, key: str) -> Any:
        if self._session is None:
            # SGLang queues; a limit on connections here would only hide requests from its scheduler.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.request(method, self._url + path, json=body, headers=headers) as reply:
            if reply.status != 200:
                text = " ".join((await reply.text()).split())[:500]
                raise EngineReplyError(f"engine {self._engine}: {path} answered {reply.status}: {text}")
            if reply.content_type != "application/json":
                await reply.read()
                return None
            return await reply.json()
