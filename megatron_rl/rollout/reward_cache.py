"""Rewards remembered by prompt and text."""

from __future__ import annotations

from collections import OrderedDict

from megatron_rl.types.rollout import RewardResult

Key = tuple[str, str, str, bool]
"""(reward, prompt id, text, ended by itself)"""


class RewardCache:
    """The last `size` rewards that were asked for; 0: none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: OrderedDict[Key, RewardResult] = OrderedDict()

    def get(self, key: Key) -> RewardResult | None:
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: Key, result: RewardResult) -> None:
        self._results[key] = result
        if len(self._results) > self._size:
            self._results.popitem(last=False)
