"""Trainer ranks and engines as real processes that die or lose a connection at a given moment, with handles that
`WeightSync` works on.

A moment is a number of calls: a fuse in the child counts what passes its channels and strikes at the n-th, so that every
seed hits the same place of a sync on every machine. Children come from a fork server that has imported everything, so that
a new one costs milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator
from typing import Any, Literal

import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.channel import Channel
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.rollout.embedded.engine import EmbeddedEngine
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import expected_shard, live_vocab_rows

KEY, FAMILY = b"k" * 32, "qwen3_moe"
LAYOUT, ENGINES = ParallelLayout(tp=2, etp=2), EngineLayout(tp=2, num_engines=2)
DIMS = ModelDims(
    num_layers=4, hidden_size=192, num_heads=6, num_kv_heads=2, head_dim=32, vocab_size=300, ffn_size=256, num_experts=8,
    top_k=2, moe_ffn_size=256, tied_embeddings=False, qk_norm=True, norm_topk_prob=True, norm_epsilon=1e-6,
    rope_theta=1e4, max_positions=64,
)  # fmt: skip
START_TIMEOUT_S = 120.0


class ProcessDiedError(RuntimeError):
    """A child ended by itself; the message names it."""


class Child:
    """A process that answers calls, one at a time; its death is an error of the call that waits."""

    def __init__(self, name: str, kind: type, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.name, self._lock = name, asyncio.Lock()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()

    async def call(self, method: str, *arguments: Any) -> Any:
        async with self._lock:
            return await asyncio.to_thread(self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ProcessDiedError(f"{self.name} died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join(10.0)
        self._pipe.close()


class Fuse:
    """Counts the calls on this process's channels and strikes at a given one."""

    def __init__(self) -> None:
        self.count, self._at, self._lock = 0, -1, threading.Lock()
        self._action: Literal["die", "cut"] = "die"
        original = Channel._reporting

        @contextlib.contextmanager
        def counted(channel: Channel) -> Iterator[None]:
            with original(channel):
                self.tick(channel)
                yield

        Channel._reporting = counted  # type: ignore[method-assign]

    def light(self, calls: int, action: Literal["die", "cut"]) -> None:
        """Strike before the call after `calls` more."""
        with self._lock:
            self._at, self._action = self.count + calls, action

    def tick(self, channel: Channel | None = None) -> None:
        with self._lock:
            is_struck, self.count = self.count == self._at, self.count + 1
        if is_struck and self._action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif is_struck and channel is not None:
            channel._socket.shutdown(socket.SHUT_RDWR)


def serve(pipe: Any, kind: type, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    fuse = Fuse()
    served = kind(fuse, *arguments)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(served, method)(*args))
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller gets it
            error.__cause__ = error.__context__ = None
            try:
                pipe.send(error)
            except (TypeError, ValueError, AttributeError):
                pipe.send(RuntimeError(traceback.format_exc()))


class Fused:
    """What a test asks of every child."""

    fuse: Fuse

    def count(self) -> int:
        return self.fuse.count

    def light(self, calls: int, action: Literal["die", "cut"]) -> None:
        self.fuse.light(calls, action)


class Trainer(Fused):
    """One rank: weights drawn from a seed, sent on call."""

    def __init__(self, fuse: Fuse, rank: int, transport: str, timeout_s: float) -> None:
        self.fuse, self.rank, self.transport, self.timeout_s = fuse, rank, transport, timeout_s
        self.chunks: Any = None
        self.sender: WeightSender | None = None

    def load(self, seed: int) -> None:
        options = {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
        source = RandomSource(seed, DIMS.num_layers)
        self.chunks = import_params(source, get_family(FAMILY), DIMS, LAYOUT, self.rank, **options)

    def send(self, order: Any) -> Any:
        if self.sender is None or self.sender.addresses != order.addresses:
            options = SendOptions(bucket_bytes=64 * 1024, timeout_s=self.timeout_s, transport=self.transport)
            plan = build_reshard_plan(FAMILY, DIMS, LAYOUT, ENGINES)
            self.sender = WeightSender(plan, self.rank, order.addresses, KEY, options)
        return self.sender.send(self.chunks, order)


class Engine(Fused):
    """An embedded engine with its receivers."""

    def __init__(self, fuse: Fuse, is_local: bool) -> None:
        self.fuse = fuse
        self.engine = EmbeddedEngine(DIMS, ENGINES.tp, torch.float32, num_slots=2, max_context=32, stop_token_ids=())
        self.receivers = [Receiver(shard, KEY, is_local=is_local) for shard in self.engine.weights.shards]
        for receiver in self.receivers:
            receiver.start()

    def addresses(self) -> list[tuple[str, int]]:
        return [receiver.address for receiver in self.receivers]

    def run(self, method: str, *arguments: Any) -> Any:
        self.fuse.tick()
        return asyncio.run(getattr(self.engine, method)(*arguments))

    def holds(self, seed: int) -> bool:
        """Whether every live weight is that of a seed."""
        for rank, shard in enumerate(self.engine.weights.shards):
            want = expected_shard(get_family(FAMILY), DIMS, ENGINES, RandomSource(seed, DIMS.num_layers), torch.float32, rank)
            rows = live_vocab_rows(DIMS, ENGINES)[rank]
            for name, value in want.items():
                live = rows if name in ("model.embed_tokens.weight", "lm_head.weight") else None
                if not torch.equal(shard[name][:live], value[:live]):
                    return False
        return True


class EngineHandle:
    """The `GenerationEngine` of a child, as far as a sync uses it."""

    def __init__(self, child: Child) -> None:
        self.child = child

    async def pause(self, mode: str) -> None:
        await self.child.call("run", "pause", mode)

    async def resume(self) -> None:
        await self.child.call("run", "resume")

    async def load_weights(self, update: Any) -> Any:
        return await self.child.call("run", "load_weights", dict(update))

    async def policy_version(self) -> Any:
        return await self.child.call("run", "policy_version")


class TrainerHandles:
    def __init__(self, children: list[Child]) -> None:
        self.children = children

    async def send_weights(self, order: Any) -> list[Any]:
        sent = await asyncio.gather(*(child.call("send", order) for child in self.children))
        return [digest for digests in sent for digest in digests]

    async def score_tokens(self, token_ids: Any) -> Any:
        raise NotImplementedError("no probe is asked for")


class KillWorld:
    """Two trainer ranks and two engines of two ranks each. Transport `tcp`: p2p to engines that are only reached over TCP."""

    def __init__(self, transport: str, staging: str, timeout_s: float) -> None:
        self.arguments = transport.replace("tcp", "p2p"), timeout_s
        self.section = SyncSection(timeout_s=timeout_s, staging=staging)
        self.trainers = [Child(f"trainer {rank}", Trainer, rank, *self.arguments) for rank in range(2)]
        self.engines = [Child(f"engine {number}", Engine, transport != "tcp") for number in range(2)]
        self.calls: dict[str, int] = {}
        """How many calls of the trainer, engine or connection that may be struck one sync makes."""

    @property
    def victims(self) -> dict[str, Child]:
        return {"trainer": self.trainers[1], "engine": self.engines[1]}

    async def start(self) -> WeightSync:
        async with asyncio.timeout(START_TIMEOUT_S):
            addresses = [tuple(a) for engine in self.engines for a in await engine.call("addresses")]
        plan = build_reshard_plan(FAMILY, DIMS, LAYOUT, ENGINES)
        self.handles = TrainerHandles(list(self.trainers))
        handles = [EngineHandle(engine) for engine in self.engines]
        return WeightSync(plan, self.handles, handles, addresses, KEY, self.section)

    async def load(self, seed: int) -> None:
        await asyncio.gather(*(trainer.call("load", seed) for trainer in self.trainers))

    def replace_trainer(self, rank: int) -> None:
        self.trainers[rank].close()
        self.trainers[rank] = self.handles.children[rank] = Child(f"trainer {rank}", Trainer, rank, *self.arguments)

    def close(self) -> None:
        for child in (*self.trainers, *self.engines):
            child.close()
