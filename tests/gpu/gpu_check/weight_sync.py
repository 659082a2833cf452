"""Do weights arrive bit by bit? Trainer in this process, engine in a second one on the same GPU, CUDA IPC between them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from gpu_check.engine_process import hash_params
from gpu_check.models import (
    DTYPES,
    ONE_RANK,
    VOCAB_MULTIPLE,
    draw_samples,
    engine_params,
    exported_tensors,
    one_rank_policy,
    section,
)
from gpu_check.sizes import Sizes
from megatron_rl.batching.build import build_train_batch
from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.model_families.registry import get_family
from megatron_rl.platforms.platform import Platform
from megatron_rl.resharding.box_sender import SendOptions
from megatron_rl.resharding.channel import Address
from megatron_rl.resharding.execute import WeightSender
from megatron_rl.resharding.plan import ReshardPlan, build_reshard_plan
from megatron_rl.resharding.transports.table import TransportChoice
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.layout import EngineLayout
from megatron_rl.types.resharding import ShardDigest, SyncOrder
from megatron_rl.types.rollout import PolicyVersion

ENGINE_TP = 2
START_TIMEOUT_S, CALL_TIMEOUT_S = 120.0, 60.0
DTYPE = "bf16"


class EngineProcess:
    """The part of a `GenerationEngine` that a weight sync uses, in a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.addresses: list[Address] = []

    async def start(self, setup: Mapping[str, Any]) -> None:
        self.addresses = [tuple(address) for address in await self._exchange(setup, START_TIMEOUT_S)]

    async def pause(self, mode: str) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        return await self._call("load_weights", dict(update))

    async def policy_version(self) -> PolicyVersion:
        return await self._call("policy_version")

    async def hash_params(self) -> list[dict[str, str]]:
        return await self._call("hash_params")

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._exchange({"call": name, "arguments": arguments}, CALL_TIMEOUT_S)

    async def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError(f"the engine's process ended (exit {await self._process.wait()}); its error stands above")
        return json.loads(line)


@asynccontextmanager
async def engine_process(setup: Mapping[str, Any]) -> AsyncIterator[EngineProcess]:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = (sys.executable, "-m", "gpu_check.engine_process")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, limit=2**24)
    try:
        engine = EngineProcess(process)
        await engine.start(setup)
        yield engine
        process.stdin.close()
        await asyncio.wait_for(process.wait(), CALL_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            process.kill()
        await process.wait()


class OneRankSender:
    """`WeightSenders` of a world of one rank."""

    def __init__(
        self, plan: ReshardPlan, trainer: PolicyTrainer, addresses: Sequence[Address], key: bytes, transport: TransportChoice
    ) -> None:
        options = SendOptions(bucket_bytes=8 * 1024 * 1024, timeout_s=CALL_TIMEOUT_S, transport=transport)
        self._trainer, self._sender = trainer, WeightSender(plan, 0, addresses, key, options)

    async def send_weights(self, order: SyncOrder) -> list[ShardDigest]:
        return await asyncio.to_thread(self._sender.send, self._trainer.chunk_parameters(), order)

    async def score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        raise NotImplementedError("this check compares bytes; no probe is asked for")


def check_weight_sync(platform: Platform, sizes: Sizes) -> dict[str, Any]:
    """Sync, train a step, sync again; the engine's bytes must be the trainer's each time. Call it in `process_group`.

    The expected bytes are cut from exported Hugging Face tensors, without the plan that the sync follows.
    """
    return asyncio.run(_check(platform, sizes))


async def _check(platform: Platform, sizes: Sizes) -> dict[str, Any]:
    family, dims = get_family("qwen3_moe"), sizes.models["qwen3_moe"]
    transport: TransportChoice = "ipc"
    key = secrets.token_bytes(32)
    setup = {"family": family.name, "device": platform.device.type, "tp": ENGINE_TP, "dtype": DTYPE}
    minibatch = build_train_batch(
        draw_samples(dims, sizes.lengths), dp_size=1, num_minibatches=1, max_tokens_per_microbatch=2048, seed=1
    ).minibatches[0]
    plan = build_reshard_plan(family.name, dims, ONE_RANK, EngineLayout(ENGINE_TP, 1, VOCAB_MULTIPLE))
    with one_rank_policy(platform, family, dims, DTYPE, section()) as trainer:
        async with engine_process({**setup, "key": base64.b64encode(key).decode()}) as engine:
            sender = OneRankSender(plan, trainer, engine.addresses, key, transport)
            sync = WeightSync(plan, sender, [engine], engine.addresses, key, SyncSection(timeout_s=CALL_TIMEOUT_S))
            seconds, wrong, seen = [], [], []
            for _ in range(2):
                started = time.perf_counter()
                version = await sync.publish()
                seconds.append(time.perf_counter() - started)
                held = await engine.hash_params()
                tensors = exported_tensors(trainer, family)
                for rank, hashes in enumerate(held):
                    expected = hash_params(engine_params(family, dims, tensors, DTYPES[DTYPE], ENGINE_TP, rank))
                    wrong += [f"version {version}, rank {rank}: {n}" for n in expected if expected[n] != hashes.get(n)]
                seen.append(held)
                trainer.sft_minibatch(minibatch.microbatches[0], minibatch.denominators)
    num_bytes = int(plan.num_elements_between().sum()) * DTYPES[DTYPE].itemsize
    num_changed = sum(seen[0][0][name] != digest for name, digest in seen[1][0].items())
    return {
        "transport": "cuda_ipc" if platform.device.type == "cuda" else "shared_memory",
        "bytes": num_bytes,
        "first_s": seconds[0],
        "second_s": seconds[1],
        "changed_params": num_changed,
        "wrong_params": wrong[:5],
        "ok": not wrong and num_changed > 0 and version == 1,
    }
