"""How the processes of a run begin, share GPUs and end."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from megatron_rl.config.sections import ClusterSection
from megatron_rl.controller.placement import BundlePlan, Cluster
from megatron_rl.controller.remote import RankGroup, RemoteEngine, TrainerGroup
from megatron_rl.scheduling.colocation import TRAINER_STATES

logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0


async def open_cluster(section: ClusterSection, plan: BundlePlan) -> Cluster:
    """Connect in a thread, so that signals are heard meanwhile."""
    namespace = f"megatron-rl-{secrets.token_hex(4)}"
    opening = asyncio.ensure_future(asyncio.to_thread(Cluster, section, plan, namespace))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        (await opening).close()
        raise


async def give_up_gpus(groups: Sequence[RankGroup], plan: BundlePlan) -> list[list[str | None]]:
    """Free what the trainers hold; per engine and node, the GPUs of the trainer ranks beside it, in rank order (None: those
    that Ray shows it)."""
    gpus: list[str | None] = []
    for group in groups:
        assert isinstance(group, TrainerGroup), "a critic takes turns with the policy"
        await group.offload(TRAINER_STATES)
        gpus += await group.visible_gpus()
    beside = [[[gpus[rank] for rank in plan.trainers_beside(place)] for place in engine] for engine in plan.engines]
    return [[",".join(gpu for gpu in node if gpu) or None for node in engine] for engine in beside]


async def stop_all(engines: Sequence[RemoteEngine]) -> None:
    """Let engines end what they started. An engine that is dead or hangs is left to the cluster's end."""
    stops = asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
    try:
        results = await asyncio.wait_for(stops, STOP_TIMEOUT_S)
    except TimeoutError:
        logger.warning("engines did not stop within %.0f s; their processes are ended", STOP_TIMEOUT_S)
        return
    for result in results:
        if isinstance(result, Exception):
            logger.debug("while stopping: %s", result)
