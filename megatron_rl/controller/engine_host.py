"""One engine and its receivers: a plain class that an actor wraps and tests build without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.controller.model_setup import DTYPES
from megatron_rl.controller.setups import EngineSetup
from megatron_rl.platforms.platform import select_platform
from megatron_rl.resharding.execute import Address
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.protocols import GenerationEngine
from megatron_rl.types.rollout import GenerationRequest, PolicyVersion, RolloutSegment


class EngineHost:
    """The engine of one actor, whatever its kind."""

    def __init__(self, setup: EngineSetup, number: int) -> None:
        self._setup, self._number = setup, number
        self._receivers: list[Receiver] = []

    async def start(self) -> list[Address]:
        """Build the engine; returns the receiver of each of its ranks."""
        self._engine, addresses = await ENGINES[self._setup.section.engine](self)
        return addresses

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        return await self._engine.generate(request)

    async def pause(self, mode: str) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        return await self._engine.load_weights(update)

    async def policy_version(self) -> PolicyVersion:
        return await self._engine.policy_version()

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
        """Log-probs of given tokens, for probes."""
        return await self._engine.score(token_ids, temperature)

    async def stop(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        await self._stop_engine()

    async def _start_embedded(self) -> tuple[GenerationEngine, list[Address]]:
        setup, section = self._setup, self._setup.section.embedded
        torch.set_num_threads(section.num_threads)
        engine = EmbeddedEngine(
            setup.model.dims,
            section.tp_size,
            DTYPES[setup.dtype],
            select_platform(0).device,
            num_slots=section.num_slots,
            max_context=setup.max_context,
            stop_token_ids=setup.stop_token_ids,
        )

        async def stop_engine() -> None:
            engine.close()

        self._stop_engine = stop_engine
        self._receivers = [Receiver(shard, setup.key) for shard in engine.weights.shards]
        for receiver in self._receivers:
            receiver.start()
        return engine, [receiver.address for receiver in self._receivers]


ENGINES = {"embedded": EngineHost._start_embedded}
