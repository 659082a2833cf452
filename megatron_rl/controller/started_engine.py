"""What starting an engine gives, whatever its kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.resharding.channel import Address
from megatron_rl.rollout.producer import ReportingEngine


class ScoringEngine(ReportingEngine, Protocol):
    """An engine that also scores given tokens: probes compare it with the trainer."""

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-prob (float32, temperature 1) of each token given those before it; 0 for the first."""
        ...


class SharingEngine(ScoringEngine, Protocol):
    """An engine that gives memory up and takes it again; parts are `kv_cache`, `weights` and `cuda_graph`."""

    async def release_memory(self, parts: Sequence[str]) -> None:
        """Raises RuntimeError while it runs a request. Without weights it is dirty until the next commit."""
        ...

    async def resume_memory(self, parts: Sequence[str]) -> None:
        """Memory without values. Raises RuntimeError for a part that was not released."""
        ...

    async def memory_bytes(self) -> dict[str, int]:
        """What each part holds now."""
        ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that serves, the receiver of each of its ranks, and how it is ended."""

    engine: SharingEngine
    addresses: list[Address]
    stop: Callable[[], Awaitable[None]]
