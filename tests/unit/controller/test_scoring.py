"""Scoring in the controller and in the pool gives the same rewards."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.config.rollout_sections import RewardPoolSection
from megatron_rl.controller.scoring import Scoring
from megatron_rl.rewards.registry import RewardError
from megatron_rl.types.rollout import Prompt


def decode(ids) -> str:
    return "".join(map(str, ids))


def test_both_places_agree():
    async def rewards(num_workers):
        scoring = Scoring(RewardPoolSection(num_workers=num_workers), {"sums": "exact_match"}, decode)
        try:
            return [await scoring(Prompt("p", "q", (1,), "42", "sums"), ids, True) for ids in ((4, 2), (4, 3))]
        finally:
            await scoring.close()

    here, pooled = asyncio.run(rewards(0)), asyncio.run(rewards(1))
    assert here == pooled
    assert [result.is_correct for result in here] == [True, False]


def test_an_unknown_reward_is_found_before_anything_starts():
    with pytest.raises(RewardError, match="unknown reward 'exact'"):
        Scoring(RewardPoolSection(num_workers=1), {"sums": "exact"}, decode)
