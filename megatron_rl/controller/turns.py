"""Colocation: trainers and engines take turns on shared GPUs, in the order that `scheduling.colocation` owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from megatron_rl.config.sections import OptimizerSection
from megatron_rl.controller.batcher import StepBatch
from megatron_rl.controller.loop import Trainers
from megatron_rl.controller.started_engine import SharingEngine
from megatron_rl.scheduling.colocation import ENGINE_PARTS, TRAINER_STATES, Colocation, Move
from megatron_rl.types.rollout import EngineLoad
from megatron_rl.types.training import TrainBatch

POLL_S = 0.05
Span = Callable[[str], AbstractContextManager[None]]
"""Times a named block."""


class SharingTrainers(Protocol):
    """The trainer ranks, as far as their memory goes."""

    async def offload(self, states: Sequence[str]) -> dict[str, int]:
        """Give these states' device memory up; the bytes of each, over all ranks."""
        ...

    async def onload(self, states: Sequence[str]) -> None: ...


class Turns:
    """Whose turn it is. Before the first turn the engines hold their memory and the trainers have given theirs up."""

    def __init__(
        self,
        trainers: SharingTrainers,
        engines: Sequence[SharingEngine],
        *,
        pause_mode: str,
        timeout_s: float,
        span: Span,
        record: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Each move is a span `colocation/NAME`. After a turn `record` gets the bytes of every state on either side."""
        self._trainers, self._engines = trainers, engines
        self._pause_mode, self._timeout_s = pause_mode, timeout_s
        self._span, self._record = span, record
        self._machine = Colocation()
        self._bytes: dict[str, float] = {}

    async def to_trainers(self) -> None:
        """The trainers hold everything when this returns. Raises TimeoutError when an engine does not come to rest."""
        if self._machine.are_trainers_up:
            return
        with self._move(Move.RELEASE_ENGINES, await self._quiesce()):
            for held in await asyncio.gather(*(engine.memory_bytes() for engine in self._engines)):
                self._add("engine", held)
            await asyncio.gather(*(engine.release_memory(ENGINE_PARTS) for engine in self._engines))
        with self._move(Move.ONLOAD_TRAINERS):
            await self._trainers.onload(TRAINER_STATES)

    @contextmanager
    def training(self) -> Iterator[None]:
        """The time of a training step."""
        with self._move(Move.TRAIN):
            yield

    async def before_sync(self) -> None:
        """Both sides hold weights, and nothing else, when this returns."""
        if self._machine.awaits_sync:  # after a sync that failed
            return
        await self.to_trainers()
        with self._move(Move.OFFLOAD_OPTIMIZER):
            self._add("trainer", await self._trainers.offload(("gradients", "optimizer")))
        with self._move(Move.RESUME_WEIGHTS):
            await asyncio.gather(*(engine.resume_memory(("weights",)) for engine in self._engines))

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """The time of a sync."""
        with self._move(Move.SYNC):
            yield

    async def after_sync(self) -> None:
        """The engines hold everything when this returns."""
        with self._move(Move.OFFLOAD_PARAMETERS):
            self._add("trainer", await self._trainers.offload(("parameters",)))
        with self._move(Move.RESUME_CACHE):
            await asyncio.gather(*(engine.resume_memory(("kv_cache", "cuda_graph")) for engine in self._engines))
        self._record(self._bytes)
        self._bytes = {}

    @contextmanager
    def _move(self, move: Move, num_running: int = 0) -> Iterator[None]:
        with self._machine.move(move, num_running), self._span(f"colocation/{move}"):
            yield

    async def _quiesce(self) -> int:
        """Pause the engines and wait until nothing runs; how many requests still do."""
        await asyncio.gather(*(engine.pause(self._pause_mode) for engine in self._engines))
        try:
            async with asyncio.timeout(self._timeout_s):
                while num_running := sum(load.num_running for load in await self._loads()):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            loads = ", ".join(str(load.num_running) for load in await self._loads())
            raise TimeoutError(f"engines still run {loads} requests {self._timeout_s:g} s after a pause") from None
        return num_running

    async def _loads(self) -> list[EngineLoad]:
        return await asyncio.gather(*(engine.load() for engine in self._engines))

    def _add(self, side: str, sizes: Mapping[str, int]) -> None:
        for name, num_bytes in sizes.items():
            key = f"memory/{side}_{name}_bytes"
            self._bytes[key] = self._bytes.get(key, 0.0) + num_bytes


class ColocatedTrainers:
    """The trainers of the loop: whatever they are asked for, it is their turn first."""

    def __init__(self, trainers: Trainers, turns: Turns) -> None:
        self._trainers, self._turns = trainers, turns

    async def begin_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._turns.to_trainers()
        with self._turns.training():
            await self._trainers.begin_phase(section, num_optimizer_steps)

    async def sft_step(self, batch: TrainBatch) -> dict[str, float]:
        await self._turns.to_trainers()
        with self._turns.training():
            return await self._trainers.sft_step(batch)

    async def train_step(self, batch: StepBatch, version: int) -> dict[str, float]:
        await self._turns.to_trainers()
        with self._turns.training():
            return await self._trainers.train_step(batch, version)

    async def begin_critic_phase(self, section: OptimizerSection, num_optimizer_steps: int) -> None:
        await self._turns.to_trainers()
        with self._turns.training():
            await self._trainers.begin_critic_phase(section, num_optimizer_steps)

    async def value_step(self, batch: StepBatch) -> dict[str, float]:
        await self._turns.to_trainers()
        with self._turns.training():
            return await self._trainers.value_step(batch)
