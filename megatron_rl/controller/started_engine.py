"""What starting an engine gives, whatever its kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.resharding.control import Address
from megatron_rl.types.protocols import GenerationEngine


class ScoringEngine(GenerationEngine, Protocol):
    """An engine that also scores given tokens: probes compare it with the trainer."""

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-prob (float32, temperature 1) of each token given those before it; 0 for the first."""
        ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that serves, the receiver of each of its ranks, and how it is ended."""

    engine: ScoringEngine
    addresses: list[Address]
    stop: Callable[[], Awaitable[None]]
