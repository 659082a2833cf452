"""Starting an embedded engine with its receivers."""

from __future__ import annotations

import torch

from megatron_rl.controller.model_setup import DTYPES
from megatron_rl.controller.setups import EngineSetup
from megatron_rl.controller.started_engine import StartedEngine
from megatron_rl.platforms.platform import select_platform
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.rollout.embedded.engine import EmbeddedEngine


async def start_embedded(setup: EngineSetup, number: int, interface: str, meeting: str | None) -> StartedEngine:
    """The torch engine in this process, with one receiver per tensor-parallel shard. It never spans nodes."""
    section = setup.section.embedded
    platform = select_platform(0)
    platform.prepare_torch(DTYPES[setup.dtype])
    torch.set_num_threads(section.num_threads)
    engine = EmbeddedEngine(
        setup.model.dims,
        section.tp_size,
        DTYPES[setup.dtype],
        platform.device,
        num_slots=section.num_slots,
        max_context=setup.max_context,
        stop_token_ids=setup.stop_token_ids,
        returns_routing=setup.returns_routing,
    )
    receivers = [Receiver(shard, setup.key, interface) for shard in engine.weights.shards]
    for receiver in receivers:
        receiver.start()

    async def stop() -> None:
        for receiver in receivers:
            receiver.close()
        engine.close()

    return StartedEngine(engine, [receiver.address for receiver in receivers], stop)
