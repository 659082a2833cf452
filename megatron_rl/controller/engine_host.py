"""One engine and its receivers: a plain class that an actor wraps and tests build without Ray."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.controller.interfaces import free_address, see_devices
from megatron_rl.controller.request_stream import Answer, RequestDesk
from megatron_rl.controller.setups import EngineSetup
from megatron_rl.controller.started_engine import SharingEngine, StartedEngine
from megatron_rl.resharding.channel import Address
from megatron_rl.types.rollout import EngineLoad, GenerationRequest, PolicyVersion

ENGINES: dict[str, str] = {
    # rollout.engine: module:function. Only the chosen one is imported, so that an actor needs one engine's libraries.
    "embedded": "megatron_rl.controller.embedded_host:start_embedded",
    "sglang": "megatron_rl.controller.sglang_host:start_sglang",
}


class EngineHost:
    """The engine of one actor, whatever its kind."""

    def __init__(self, setup: EngineSetup, number: int, interface: str) -> None:
        self._setup, self._number, self._interface = setup, number, interface
        self._started: StartedEngine | None = None
        self._desk = RequestDesk(
            lambda request: self._engine.generate(request), lambda request_ids: self._engine.abort(request_ids)
        )

    async def free_address(self) -> Address:
        """This node's interface and a port that is free on it, where the nodes of an engine meet."""
        return free_address(self._interface)

    async def start(self, meeting: str | None, devices: str | None = None) -> list[Address]:
        """Build the engine; returns the receiver of each of its ranks. `meeting`: see `start_sglang`. `devices`: the GPUs
        that it shares with trainers, as CUDA_VISIBLE_DEVICES names them; None: those that Ray gave it."""
        see_devices(devices)
        module, function = ENGINES[self._setup.section.engine].split(":")
        start = getattr(importlib.import_module(module), function)
        self._started = await start(self._setup, self._number, self._interface, meeting)
        assert self._started is not None
        return self._started.addresses

    async def exchange(self, requests: Sequence[GenerationRequest], cancelled: Sequence[str], wait: bool) -> list[Answer]:
        return await self._desk.exchange(requests, cancelled, wait)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._desk.abort(request_ids)

    async def pause(self, mode: str) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        return await self._engine.load_weights(update)

    async def policy_version(self) -> PolicyVersion:
        return await self._engine.policy_version()

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._engine.score(token_ids)

    async def release_memory(self, parts: Sequence[str]) -> None:
        await self._engine.release_memory(parts)

    async def resume_memory(self, parts: Sequence[str]) -> None:
        await self._engine.resume_memory(parts)

    async def memory_bytes(self) -> dict[str, int]:
        return await self._engine.memory_bytes()

    async def stop(self) -> None:
        if self._started is not None:
            await self._started.stop()

    @property
    def _engine(self) -> SharingEngine:
        if self._started is None:
            raise RuntimeError(f"engine-{self._number} was not started")
        return self._started.engine
