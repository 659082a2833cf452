"""Actor handles behind the interfaces that the loop knows: engines one by one, trainer ranks as a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import share_of
from megatron_rl.controller.request_stream import RequestStream
from megatron_rl.layout.coords import coords_of
from megatron_rl.resharding.execute import Address
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.resharding import ShardDigest
from megatron_rl.types.rollout import GenerationRequest, PolicyVersion, RolloutSegment
from megatron_rl.types.training import TrainBatch

T = TypeVar("T")
NODE_VERDICT_S = 20.0
"""When an engine over nodes fails: how long until the nodes' own processes have told whether they live. A server whose main
process died gets ten seconds to end its children."""


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
    """A `GenerationEngine` in an actor (`EngineActor`); `nodes` are the actors of its further nodes (`EngineNodeActor`)."""

    def __init__(self, actor: Any, name: str, logs: str, nodes: Sequence[Any] = ()) -> None:
        self._actor, self._name, self._logs = actor, name, logs
        self._nodes = nodes
        self._watches: list[asyncio.Future[None]] = []
        self._stream = RequestStream(lambda *batch: self._call("exchange", *batch))

    async def start(self) -> list[Address]:
        """Start the engine on all its nodes; the receivers of its ranks. From here on the death of a node fails calls."""
        meeting = None
        if self._nodes:
            host, port = await self._call("free_address")
            meeting = f"{host}:{port}"
        addresses, *_ = await asyncio.gather(
            self._call("start", meeting), *(self._call_node(index, "start", meeting) for index in range(len(self._nodes)))
        )
        self._watches = [asyncio.ensure_future(self._call_node(index, "watch")) for index in range(len(self._nodes))]
        return [tuple(address) for address in addresses]

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        return await self._or_dead_node(self._stream.generate(request))

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
        for watch in self._watches:
            watch.cancel()
        self._watches.clear()
        nodes = (self._call_node(index, "stop") for index in range(len(self._nodes)))
        await asyncio.gather(self._call("stop"), *nodes)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._or_dead_node(_guarded(self._name, self._logs, self._actor.call.remote(method, *args)))

    async def _or_dead_node(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives; when it fails, or before it ends, the death of a node that explains it."""
        if not self._watches:
            return await work
        task = asyncio.ensure_future(work)
        try:
            watched: list[asyncio.Future[Any]] = [task, *self._watches]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.exception() is not None:
                # The first node fails with the others, often before their death is noticed.
                ended, _ = await asyncio.wait(self._watches, timeout=NODE_VERDICT_S, return_when=asyncio.FIRST_COMPLETED)
                for watch in ended:
                    watch.result()  # raises what ended the node
            return await task
        finally:
            task.cancel()

    async def _call_node(self, index: int, method: str, *args: Any) -> Any:
        name = f"{self._name}-node-{index + 1}"
        return await _guarded(name, self._logs, self._nodes[index].call.remote(method, *args))


class TrainerGroup:
    """All trainer ranks (`TrainerActor`s). Every call runs on all of them and waits for all."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, key: bytes, logs: str) -> None:
        self._actors, self._key, self._logs = actors, key, logs
        self._layout = layout

    async def start(self) -> bool:
        """Whether the ranks can compute the prompt of a group once, after all have started."""
        address = await _guarded("trainer-0", self._logs, self._actors[0].call.remote("free_address"))
        return all(await self._all("start", tuple(address)))

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._all("begin_phase", section, num_optimizer_steps)

    async def train_step(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Annotate and train one batch sampled by (at latest) `version`; metrics over all ranks."""
        return await self._on_shares("train_step", batch, version)

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        return await self._on_shares("sft_step", batch)

    async def send_weights(self, addresses: Sequence[Address], dtype: str, version: int) -> list[ShardDigest]:
        sent = await self._all("send_weights", list(addresses), self._key, dtype, version)
        return [digest for digests in sent for digest in digests]

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
