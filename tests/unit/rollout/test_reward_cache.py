"""The last few rewards."""

from __future__ import annotations

from megatron_rl.rollout.reward_cache import RewardCache
from megatron_rl.types.rollout import RewardResult


def test_it_keeps_what_was_asked_for_last():
    cache = RewardCache(2)
    keys = [("reward", f"p{number}", "text", True) for number in range(3)]
    for number, key in enumerate(keys[:2]):
        cache.put(key, RewardResult(float(number), True))
    assert cache.get(keys[0]).reward == 0.0
    cache.put(keys[2], RewardResult(2.0, True))
    assert [cache.get(key) is None for key in keys] == [False, True, False]
    empty = RewardCache(0)
    empty.put(keys[0], RewardResult(1.0, True))
    assert empty.get(keys[0]) is None
