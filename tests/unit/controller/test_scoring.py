"""Scoring in the controller and in the pool gives the same rewards."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.config.rollout_sections import JudgeSection, RewardPartSection, RewardPoolSection, RewardSumSection
from megatron_rl.controller.scoring import Scoring
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.reward_pool import FAILED
from megatron_rl.types.rollout import Prompt, RewardResult


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


def score_once(section: RewardPoolSection, name: str, ids, judged=None):
    async def go():
        scoring = Scoring(section, {"sums": name}, decode)
        for judge_name, result in (judged or {}).items():
            scoring._judges[judge_name] = Graded(result)
        try:
            return await scoring(Prompt("p", "q", (1,), "42", "sums"), ids, True)
        finally:
            await scoring.close()

    return asyncio.run(go())


class Graded:
    def __init__(self, result):
        self.result = result

    async def score(self, prompt, text, is_finished):
        assert (prompt.prompt_id, text, is_finished) == ("p", "42", True)
        return self.result

    async def close(self):
        pass


PARTS = (RewardPartSection("exact_match", 2.0), RewardPartSection("style", 0.5))
MIXED = RewardPoolSection(judges=(JudgeSection("style", "http://nowhere"),), sums=(RewardSumSection("mixed", PARTS),))


def test_a_sum_weighs_its_parts_and_the_first_says_what_is_correct():
    result = score_once(MIXED, "mixed", (4, 2), {"style": RewardResult(-1.0, False)})
    assert result == RewardResult(1.5, True, {"exact_match": 1.0, "style": -1.0})
    assert score_once(MIXED, "style", (4, 2), {"style": RewardResult(0.3, True)}) == RewardResult(0.3, True)


def test_a_part_that_failed_fails_the_sum():
    assert score_once(MIXED, "mixed", (4, 2), {"style": FAILED}) is FAILED


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        (MIXED, "styl", "unknown reward 'styl'"),
        (RewardPoolSection(sums=(RewardSumSection("mixed", PARTS),)), "mixed", "unknown reward 'style'"),
        (RewardPoolSection(judges=(JudgeSection("exact_match", "http://x"),)), "exact_match", "is the name of a reward of its"),
        (RewardPoolSection(), "python_program", "runs programs, .* set rollout.rewards.num_workers to at least 1"),
    ],
)
def test_what_cannot_be_scored_is_found_before_anything_starts(section, name, message):
    with pytest.raises(RewardError, match=message):
        Scoring(section, {"sums": name}, decode)
