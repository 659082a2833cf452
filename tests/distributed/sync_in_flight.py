"""What each trainer process does in the test of many syncs in a row while the engine generates.

Rank 0 keeps long requests running in the engine, publishes new weights in the middle of them, and reports what came of
both: the version spans of the requests that were caught, and how far the engine then is from a fresh load.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.checkpoint.hf_export import merge_export
from megatron_rl.config.sections import SyncSection
from megatron_rl.controller.policy_worker import PolicyWorker
from megatron_rl.controller.weight_sync import WeightSync
from megatron_rl.model_families.declaration import ModelDims
from megatron_rl.model_families.registry import get_family
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.rollout.sglang.engine import SglangEngine
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.rollout import GenerationRequest, RolloutSegment, SamplingParams
from tests.distributed.launch import Rank
from tests.distributed.sync_walk import (
    TEXT,
    TIMEOUT_S,
    Commands,
    engine_layout_of,
    open_engine,
    reference_logprobs,
    train_step,
    worker_setup,
)

NUM_REQUESTS = 3
MAX_NEW_TOKENS = 48
POLL_S = 0.02


def sync_in_flight(
    me: Rank, *, dims: dict, family: str, sizes: dict, engine: dict, key_hex: str, pause_modes: list[str]
) -> list[dict[str, Any]]:
    """One sync with nothing running, then one per pause mode with requests in flight. Rank 0 returns one report of each."""
    layout = ParallelLayout(**sizes)
    model_dims = ModelDims(**dims)
    worker = PolicyWorker(worker_setup(model_dims, family, layout, engine_layout_of(engine)), me.rank)
    worker.start(("127.0.0.1", me.port))
    commands = Commands(worker, bytes.fromhex(key_hex))
    try:
        with tempfile.TemporaryDirectory() as folder:
            box = [folder]
            dist.broadcast_object_list(box, src=0)
            if me.rank == 0:
                return asyncio.run(_publish_all(commands, layout, family, model_dims, engine, Path(box[0]), pause_modes))
            for number in range(len(pause_modes) + 1):
                train_step(worker, layout, number)
                commands.follow()
                worker.export_part(f"{box[0]}/parts-{number}")
                dist.barrier()
            return []
    finally:
        worker.stop()


async def _publish_all(
    commands: Commands,
    layout: ParallelLayout,
    family: str,
    dims: ModelDims,
    engine: dict,
    folder: Path,
    pause_modes: list[str],
) -> list[dict[str, Any]]:
    plan = build_reshard_plan(family, dims, layout, engine_layout_of(engine))
    target, addresses, close = await open_engine(engine, dims, commands.key)
    section = SyncSection(timeout_s=TIMEOUT_S, bucket_bytes=50_000)
    sync = WeightSync(plan, commands, [target], addresses, commands.key, section)
    reports = []
    try:
        for number, mode in enumerate([None, *pause_modes]):
            train_step(commands.worker, layout, number)
            caught = [] if mode is None else await _start(target, number)
            await sync.publish(mode)
            commands.done()
            commands.worker.export_part(f"{folder}/parts-{number}")
            dist.barrier()
            fresh = folder / f"hf-{number}"
            merge_export(f"{folder}/parts-{number}", fresh, get_family(family), dims, torch.float32)
            later = GenerationRequest(f"later-{number}", TEXT, SamplingParams(max_new_tokens=5), seed=number)
            (segment,) = await target.generate(later)
            text = (*TEXT, *segment.token_ids)
            reference = reference_logprobs(fresh, text)
            gap = np.abs(np.array(segment.logprobs) - reference[len(TEXT) :]).max()
            report = {"mode": mode, "gap": float(gap), "version": segment.policy_version, "logprobs": reference.tolist()}
            reports.append(report | {"caught": [_describe(await request) for request in caught]})
    finally:
        sync.close()
        await close()
    return reports


async def _start(engine: SglangEngine, number: int) -> list[asyncio.Future[tuple[RolloutSegment, ...]]]:
    """Requests that have sampled some of their tokens when this returns."""
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    requests = [
        asyncio.ensure_future(engine.generate(GenerationRequest(f"{number}-{i}", (*TEXT[: 3 + i],), sampling, seed=i)))
        for i in range(NUM_REQUESTS)
    ]
    async with asyncio.timeout(TIMEOUT_S):
        while (await engine.load()).num_running < NUM_REQUESTS:
            await asyncio.sleep(POLL_S)
    return requests


def _describe(segments: tuple[RolloutSegment, ...]) -> list[dict[str, Any]]:
    return [{"version": s.policy_version, "tokens": len(s.token_ids), "finish": s.finish_reason.name} for s in segments]
