"""Trainer ranks and engines as real processes that a test may kill, with handles that `WeightSync` works on.

Children come from a fork server that has imported everything, so that a new one costs milliseconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from typing import Any

import torch

from megatron_rl.checkpoint.hf_folder import RandomSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.resharding.execute import SendOptions, WeightSender
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

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.join(10.0)
        self._pipe.close()


def serve(pipe: Any, kind: type, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    served = kind(*arguments)
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


class Trainer:
    """One rank: weights drawn from a seed, sent on call."""

    def __init__(self, rank: int, transport: str, timeout_s: float) -> None:
        self.rank, self.transport, self.timeout_s = rank, transport, timeout_s
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


class Engine:
    """An embedded engine with its receivers."""

    def __init__(self) -> None:
        self.engine = EmbeddedEngine(DIMS, ENGINES.tp, torch.float32, num_slots=2, max_context=32, stop_token_ids=())
        self.receivers = [Receiver(shard, KEY) for shard in self.engine.weights.shards]
        for receiver in self.receivers:
            receiver.start()

    def addresses(self) -> list[tuple[str, int]]:
        return [receiver.address for receiver in self.receivers]

    def run(self, method: str, *arguments: Any) -> Any:
        return asyncio.run(getattr(self.engine, method)(*arguments))

    def cut(self, number: int) -> int:
        """Break the trainers' connections to one receiver; how many there were."""
        connections = list(self.receivers[number]._connections)
        for connection in connections:
            connection.shutdown(2)
        return len(connections)

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
    """Two trainer ranks and two engines of two ranks each."""

    def __init__(self, transport: str, staging: str, timeout_s: float) -> None:
        self.arguments = transport, timeout_s
        self.section = SyncSection(timeout_s=timeout_s, staging=staging)
        self.trainers = [Child(f"trainer {rank}", Trainer, rank, *self.arguments) for rank in range(2)]
        self.engines = [Child(f"engine {number}", Engine) for number in range(2)]

    async def start(self) -> WeightSync:
        async with asyncio.timeout(START_TIMEOUT_S):
            addresses = [tuple(a) for engine in self.engines for a in await engine.call("addresses")]
        plan = build_reshard_plan(FAMILY, DIMS, LAYOUT, ENGINES)
        self.handles = TrainerHandles(self.trainers)
        handles = [EngineHandle(engine) for engine in self.engines]
        return WeightSync(plan, self.handles, handles, addresses, KEY, self.section)

    async def load(self, seed: int) -> None:
        await asyncio.gather(*(trainer.call("load", seed) for trainer in self.trainers))

    def replace_trainer(self, rank: int) -> None:
        self.trainers[rank].close()
        self.trainers[rank] = Child(f"trainer {rank}", Trainer, rank, *self.arguments)

    def close(self) -> None:
        for child in (*self.trainers, *self.engines):
            child.close()
