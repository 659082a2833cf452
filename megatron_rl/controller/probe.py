"""Do engine and trainer compute the same? The one check that two sides sharing a wrong declaration cannot pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_rl.controller.started_engine import ScoringEngine


class ScoringTrainers(Protocol):
    async def score_tokens(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The trainers' log-prob (temperature 1) of each token given those before it; 0 for the first."""
        ...


class WeightProbe:
    """A fixed batch of token ids, scored on both sides after the first sync and after every `interval`-th."""

    def __init__(self, token_ids: Sequence[Sequence[int]], interval: int, tolerance: float) -> None:
        self._token_ids = [tuple(ids) for ids in token_ids if len(ids) > 1]
        self._interval, self._tolerance = interval, tolerance

    def is_due(self, version: int) -> bool:
        return bool(self._token_ids) and self._interval > 0 and version % self._interval == 0

    async def expect(self, trainers: ScoringTrainers) -> list[np.ndarray]:
        """What the engines should say: the trainers' log-probs of the batch."""
        return await trainers.score_tokens(self._token_ids)

    async def check(self, expected: Sequence[np.ndarray], engines: Sequence[ScoringEngine]) -> list[float]:
        """The mean absolute gap per engine. Raises ValueError naming the first engine whose gap is too large."""
        scored = await asyncio.gather(*(engine.score(self._token_ids) for engine in engines))
        gaps = [compute_gap(expected, scores) for scores in scored]
        for number, gap in enumerate(gaps):
            if not gap <= self._tolerance:  # nan too
                raise ValueError(
                    f"probe: engine {number} and the trainer differ by {gap:.3g} in log-prob per token, "
                    f"sync.probe_tolerance={self._tolerance:g}; digests agree, so the model's declaration is wrong"
                )
        return gaps


def compute_gap(expected: Sequence[np.ndarray], scored: Sequence[np.ndarray]) -> float:
    """Mean absolute difference over all tokens but the first of each sequence."""
    pairs = zip(expected, scored, strict=True)
    return float(np.abs(np.concatenate([a[1:] - b[1:] for a, b in pairs])).mean())
