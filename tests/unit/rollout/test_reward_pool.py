"""Rewards in other processes: one hangs, one dies, one prints, one eats memory; the others get theirs."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from megatron_rl.config.rollout_sections import RewardPoolSection
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.reward_pool import FAILED, RewardPool
from megatron_rl.types.rollout import Prompt

MISCHIEF = """
import os, time
from megatron_rl.rewards.registry import REWARDS
from megatron_rl.types.rollout import RewardResult

def score(prompt, text, is_finished):
    print("a line that is no answer")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(7)
    if text == "memory":
        bytearray(1 << 40)
    if text == "raise":
        raise KeyError("no such thing")
    return RewardResult(float(len(text)), is_finished, {"pid": float(os.getpid())})

REWARDS["mischief"] = "sitecustomize:score"
"""


def prompt(name: str = "p0", answer: str = "6") -> Prompt:
    return Prompt(name, "2 x 3", (1, 2), answer, "sums", {"deep": {"list": [1, 2]}})


@pytest.fixture
def mischief(tmp_path, monkeypatch):
    """A reward that only the workers know."""
    (tmp_path / "sitecustomize.py").write_text(MISCHIEF)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))


def run(scenario, **options):
    async def go():
        pool = RewardPool(RewardPoolSection(**{"num_workers": 2, "timeout_s": 2.0, **options}))
        try:
            async with asyncio.timeout(100):
                return await scenario(pool)
        finally:
            await pool.close()
            assert not pool._processes

    return asyncio.run(go())


def test_a_reward_that_fails_costs_one_sample(mischief, monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.reward_pool.START_TIMEOUT_S", 30.0)

    async def scenario(pool):
        await asyncio.gather(*(pool.score("mischief", prompt(), "warm", True) for _ in range(2)))
        texts = ["one", "hang", "three", "die", "memory", "raise", "seven"]
        started = time.monotonic()
        results = await asyncio.gather(*(pool.score("mischief", prompt(), text, True) for text in texts))
        assert time.monotonic() - started < 50
        assert [r.reward for r in results] == [3.0, 0.0, 5.0, 0.0, 0.0, 0.0, 5.0]
        assert [r == FAILED for r in results] == [False, True, False, True, True, True, False]
        assert pool.num_failed == 4

    run(scenario)


def test_the_registry_and_the_cache_serve_it():
    async def scenario(pool):
        right = await pool.score("exact_match", prompt(), "6", True)
        assert right.is_correct and right.reward == 1.0
        assert not (await pool.score("exact_match", prompt(), "7", True)).is_correct
        assert await pool.score("exact_match", prompt(), "6", True) is right
        with pytest.raises(RewardError, match="unknown reward 'exact_mach'; did you mean 'exact_match'"):
            await pool.score("exact_mach", prompt(), "6", True)
        assert (await pool.score("exact_match", prompt(answer="9"), "9", False)) is not right
        assert pool.num_failed == 0

    run(scenario, num_workers=1, cache_size=8)


def test_a_cancelled_call_does_not_give_its_answer_to_the_next(mischief):
    async def scenario(pool):
        await pool.score("mischief", prompt(), "warm", True)
        lost = asyncio.create_task(pool.score("mischief", prompt(), "hang", True))
        while pool._free.qsize():
            await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert (await pool.score("mischief", prompt(), "four", True)).reward == 4.0

    run(scenario, num_workers=1)


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="at least one worker"):
        RewardPool(RewardPoolSection())
