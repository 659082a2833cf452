"""From token ids to rewards: decodes a response and has it scored, here or in the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config.rollout_sections import RewardPoolSection
from megatron_rl.rewards.registry import load_reward
from megatron_rl.rollout.reward_pool import RewardPool
from megatron_rl.types.rollout import Prompt, RewardResult


class Scoring:
    """A `Scorer`. `reward_names` maps sources to rewards; an unknown name raises RewardError at once."""

    def __init__(
        self, section: RewardPoolSection, reward_names: Mapping[str, str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._names, self._decode = reward_names, decode
        self._rewards = {name: load_reward(name) for name in set(reward_names.values())}
        self._pool = RewardPool(section) if section.num_workers else None

    async def __call__(self, prompt: Prompt, response_ids: Sequence[int], is_finished: bool) -> RewardResult:
        name, text = self._names[prompt.source], self._decode(response_ids)
        if self._pool is None:
            return self._rewards[name](prompt, text, is_finished)
        return await self._pool.score(name, prompt, text, is_finished)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
