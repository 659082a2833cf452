"""Actor handles behind the interfaces that the loop knows: engines one by one, trainer ranks as a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import StepBatch, share_of
from megatron_rl.controller.request_stream import RequestStream
from megatron_rl.layout.coords import coords_of
from megatron_rl.resharding.channel import Address
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.resharding import ShardDigest, SyncOrder
from megatron_rl.types.rollout import EngineLoad, GenerationRequest, PolicyVersion, RolloutSegment
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

    async def start(self, devices: Sequence[str | None] = ()) -> list[Address]:
        """Start the engine on all its nodes; the receivers of its ranks. From here on the death of a node fails calls.
        `devices`: per node, the GPUs that it shares with trainers."""
        devices, meeting = devices or [None] * (1 + len(self._nodes)), None
        if self._nodes:
            host, port = await self._call("free_address")
            meeting = f"{host}:{port}"
        addresses, *_ = await asyncio.gather(
            self._call("start", meeting, devices[0]),
            *(self._call_node(index, "start", meeting, devices[index + 1]) for index in range(len(self._nodes))),
        )
        self._watches = [asyncio.ensure_future(self._call_node(index, "watch")) for index in range(len(self._nodes))]
        return [tuple(address) for address in addresses]

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        return await self._or_dead_node(self._stream.generate(request))

    async def abort(self, request_ids: Sequence[str]) -> None:
        if sent := self._stream.withdraw(request_ids):
            await self._call("abort", sent)

    async def pause(self, mode: str) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        return await self._call("load_weights", update)

    async def policy_version(self) -> PolicyVersion:
        return await self._call("policy_version")

    async def load(self) -> EngineLoad:
        return await self._call("load")

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await self._call("score", token_ids)

    async def release_memory(self, parts: Sequence[str]) -> None:
        await self._call("release_memory", parts)

    async def resume_memory(self, parts: Sequence[str]) -> None:
        await self._call("resume_memory", parts)

    async def memory_bytes(self) -> dict[str, int]:
        return await self._call("memory_bytes")

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


class RankGroup:
    """The ranks of one Megatron model, as actors. Every call runs on all of them and waits for all."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, name: str, logs: str) -> None:
        self._actors, self._layout, self._name, self._logs = actors, layout, name, logs

    async def start(self) -> bool:
        """Whether the ranks can compute the prompt of a group once, after all have started."""
        address = await _guarded(f"{self._name}-0", self._logs, self._actors[0].call.remote("free_address"))
        return all(await self._all("start", tuple(address)))

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._all("begin_phase", section, num_optimizer_steps)

    async def stop(self) -> None:
        await self._all("stop")

    async def _on_shares(self, method: str, batch: TrainBatch, *args: Any) -> list[Any]:
        """Each rank gets the microbatches of its data-parallel position, put into the object store once per position."""
        shares = [ray.put(share_of(batch, dp_rank)) for dp_rank in range(self._layout.dp)]
        return await self._gather([
            actor.call.remote(method, shares[coords_of(self._layout, rank).dp], *args)
            for rank, actor in enumerate(self._actors)
        ])  # fmt: skip

    async def _by_sample(self, method: str, batch: TrainBatch) -> dict[int, np.ndarray]:
        """As `_on_shares`, for what answers with an array per sample."""
        parts = await self._on_shares(method, batch)
        return {index: array for part in parts for index, array in part.items()}

    async def _metrics(self, method: str, batch: TrainBatch, *args: Any) -> dict[str, float]:
        """As `_on_shares`, for what answers with metrics on rank 0."""
        return next(metrics for metrics in await self._on_shares(method, batch, *args) if metrics is not None)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._gather([actor.call.remote(method, *args) for actor in self._actors])

    async def _gather(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        return await asyncio.gather(*(
            _guarded(f"{self._name}-{rank}", self._logs, call) for rank, call in enumerate(calls)
        ))  # fmt: skip


class TrainerGroup(RankGroup):
    """All trainer ranks (`TrainerActor`s): the policy, and a critic that takes turns with it."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, key: bytes, logs: str) -> None:
        super().__init__(actors, layout, "trainer", logs)
        self._key = key

    async def train_step(
        self, batch: StepBatch, version: int, others: Mapping[str, Mapping[int, np.ndarray]] | None = None
    ) -> dict[str, float]:
        """Annotate and train one batch sampled by (at latest) `version`; metrics over all ranks.

        `others` are token arrays by name and sample, from models that have ranks of their own.
        """
        return await self._metrics("train_step", batch.policy, version, ray.put(others) if others else None)

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        return await self._metrics("sft_step", batch)

    async def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._all("begin_critic_phase", section, num_optimizer_steps)

    async def value_step(self, batch: StepBatch) -> dict[str, float]:
        """Train the critic alone; metrics over all ranks."""
        return await self._metrics("value_step", batch.policy)

    async def send_weights(self, order: SyncOrder) -> list[ShardDigest]:
        sent = await self._all("send_weights", order, self._key)
        return [digest for digests in sent for digest in digests]

    async def score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return (await self._all("score_tokens", token_ids))[0]

    async def offload(self, states: Sequence[str]) -> dict[str, int]:
        """Give these states' device memory up; the bytes of each, over all ranks."""
        sizes = await self._all("offload", states)
        return {state: sum(rank[state] for rank in sizes) for state in states}

    async def onload(self, states: Sequence[str]) -> None:
        await self._all("onload", states)

    async def visible_gpus(self) -> list[str | None]:
        """Per rank, what CUDA_VISIBLE_DEVICES names there."""
        return await self._all("visible_gpus")

    async def export_parts(self, folder: str) -> None:
        await self._all("export_part", folder)


class CriticGroup(RankGroup):
    """All ranks of a critic that has ranks of its own (`CriticActor`s)."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, logs: str) -> None:
        super().__init__(actors, layout, "critic", logs)

    async def load_policy(self, folder: str) -> None:
        await self._all("load_policy", folder)

    async def compute_values(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """The values of all samples, by their position in the step's list."""
        return await self._by_sample("compute_values", batch)

    async def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the batch of the last `compute_values`."""
        return await self._metrics("train_step", batch)

    async def value_step(self, batch: TrainBatch) -> dict[str, float]:
        return await self._metrics("value_step", batch)


class ReferenceGroup(RankGroup):
    """All ranks of a reference that has ranks of its own (`ReferenceActor`s)."""

    def __init__(self, actors: Sequence[Any], layout: ParallelLayout, logs: str) -> None:
        super().__init__(actors, layout, "reference", logs)

    async def load_policy(self, folder: str) -> None:
        await self._all("load_policy", folder)

    async def compute_logprobs(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """The log-probs of all samples, by their position in the step's list."""
        return await self._by_sample("compute_logprobs", batch)


class RoleGroups:
    """The trainers of a run in which the critic, the reference or both have ranks of their own.

    `load_policy` exports the policy's weights and has the given group load them. The critic starts from them if
    `critic_starts_anew`. The reference is the policy at the beginning of the last phase, and every `refresh_interval`
    training steps anew, unless it `is_teacher`.
    """

    def __init__(
        self,
        policy: TrainerGroup,
        critic: CriticGroup | None,
        reference: ReferenceGroup | None,
        load_policy: Callable[[CriticGroup | ReferenceGroup], Awaitable[None]],
        *,
        critic_starts_anew: bool = False,
        is_teacher: bool = False,
        refresh_interval: int | None = None,
    ) -> None:
        self._policy, self._critic, self._reference, self._load_policy = policy, critic, reference, load_policy
        self._critic_starts_anew, self._is_teacher, self._refresh_interval = critic_starts_anew, is_teacher, refresh_interval
        self._num_steps, self._has_moved = 0, False

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._policy.begin_phase(section, num_optimizer_steps)
        self._num_steps = 0
        if self._reference is not None and not self._is_teacher and self._has_moved:
            await self._load_policy(self._reference)

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        self._has_moved = True
        return await self._policy.sft_step(batch)

    async def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        if self._critic is None:
            await self._policy.begin_critic_phase(section, num_optimizer_steps)
            return
        if self._critic_starts_anew:
            await self._load_policy(self._critic)
            self._critic_starts_anew = False
        await self._critic.begin_phase(section, num_optimizer_steps)

    async def value_step(self, batch: StepBatch) -> dict[str, float]:
        if self._critic is None:
            return await self._policy.value_step(batch)
        assert batch.critic is not None
        return await self._critic.value_step(batch.critic)

    async def train_step(self, batch: StepBatch, version: int) -> dict[str, float]:
        """Those beside the policy score side by side, then policy and critic train side by side."""
        critic, reference = self._critic, self._reference
        scoring: dict[str, Awaitable[dict[int, np.ndarray]]] = {}
        if critic is not None and batch.critic is not None:
            scoring["values"] = critic.compute_values(batch.critic)
        if reference is not None and batch.reference is not None:
            scoring["ref_logprobs"] = reference.compute_logprobs(batch.reference)
        others = dict(zip(scoring, await asyncio.gather(*scoring.values()), strict=True))
        training = [self._policy.train_step(batch, version, others)]
        if critic is not None and batch.critic is not None:
            training.append(critic.train_step(batch.critic))
        metrics: dict[str, float] = {}
        for part in await asyncio.gather(*training):
            metrics |= part
        self._num_steps += 1
        self._has_moved = True
        if reference is not None and self._refresh_interval and self._num_steps % self._refresh_interval == 0:
            await self._load_policy(reference)
        return metrics
