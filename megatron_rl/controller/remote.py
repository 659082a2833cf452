"""Actor handles behind the interfaces that the loop knows: engines one by one, trainer ranks as a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import share_of
from megatron_rl.layout.coords import coords_of
from megatron_rl.resharding.control import Address
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.resharding import ShardDigest, SyncOrder
from megatron_rl.types.rollout import GenerationRequest, PolicyVersion, RolloutSegment
from megatron_rl.types.training import TrainBatch

T = TypeVar("T")


class ActorDiedError(RuntimeError):
    """A process of the run ended by itself; the message is one line that names it."""


async def _guarded(name: str, logs: str, result: Awaitable[T]) -> T:
    """An actor's answer. Its own errors come back as they were raised; its death as ActorDiedError."""
    try:
        return await result
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[-1].strip() or type(error).__name__
        raise ActorDiedError(f"{name} died ({reason}); the run stops. Logs: {logs}") from None


class RemoteEngine:
    """A `GenerationEngine` in an actor (`EngineActor`)."""

    def __init__(self, actor: Any, name: str, logs: str) -> None:
        self._actor, self._name, self._logs = actor, name, logs

    async def start(self) -> list[Address]:
        return [tuple(address) for address in await self._call("start")]

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        return await self._call("generate", request)

    async def pause(self, mode: str) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        return await self._call("load_weights", update)

    async def policy_version(self) -> PolicyVersion:
        return await self._call("policy_version")

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._call("score", token_ids)

    async def stop(self) -> None:
        await self._call("stop")

    async def _call(self, method: str, *args: Any) -> Any:
        return await _guarded(self._name, self._logs, self._actor.call.remote(method, *args))


class TrainerGroup:
    """All trainer ranks (`TrainerActor`s). Every call runs on all of them and waits for all."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, key: bytes, logs: str) -> None:
        self._actors, self._key, self._logs = actors, key, logs
        self._layout = layout

    async def start(self) -> None:
        address = await _guarded("trainer-0", self._logs, self._actors[0].call.remote("free_address"))
        await self._all("start", tuple(address))

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._all("begin_phase", section, num_optimizer_steps)

    async def train_step(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Annotate and train one batch sampled by (at latest) `version`; metrics over all ranks."""
        return await self._on_shares("train_step", batch, version)

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        return await self._on_shares("sft_step", batch)

    async def send_weights(self, order: SyncOrder) -> list[ShardDigest]:
        sent = await self._all("send_weights", order, self._key)
        return [digest for digests in sent for digest in digests]

    async def score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return (await self._all("score_tokens", token_ids))[0]

    async def export_parts(self, folder: str) -> None:
        await self._all("export_part", folder)

    async def stop(self) -> None:
        await self._all("stop")

    async def _on_shares(self, method: str, batch: TrainBatch, *args: Any) -> dict[str, float]:
        """Each rank gets the microbatches of its data-parallel position, put into the object store once per position."""
        shares = [ray.put(share_of(batch, dp_rank)) for dp_rank in range(self._layout.dp)]
        calls = [
            actor.call.remote(method, shares[coords_of(self._layout, rank).dp], *args)
            for rank, actor in enumerate(self._actors)
        ]
        results = await self._gather(calls)
        return next(metrics for metrics in results if metrics is not None)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._gather([actor.call.remote(method, *args) for actor in self._actors])

    async def _gather(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        return await asyncio.gather(*(
            _guarded(f"trainer-{rank}", self._logs, call) for rank, call in enumerate(calls)
        ))  # fmt: skip
