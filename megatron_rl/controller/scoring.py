"""From token ids to rewards: decodes a response and has it scored: here, in the pool, by a judge, or as a sum of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config.rollout_sections import RewardPoolSection, RewardSumSection
from megatron_rl.rewards.registry import REWARDS, RUNS_PROGRAMS, RewardError, load_reward
from megatron_rl.rollout.remote_judge import RemoteJudge
from megatron_rl.rollout.reward_pool import FAILED, RewardPool
from megatron_rl.types.rollout import Prompt, RewardResult


class Scoring:
    """A `Scorer`. `reward_names` maps sources to rewards, judges and sums; an unknown name raises RewardError at once, and
    so does a reward that runs programs where there is no pool to run them in."""

    def __init__(
        self, section: RewardPoolSection, reward_names: Mapping[str, str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._names, self._decode = reward_names, decode
        self._sums = {part.name: part for part in section.sums}
        self._judges = {judge.name: RemoteJudge(judge, section.cache_size) for judge in section.judges}
        for name in (*self._sums, *self._judges):
            if name in REWARDS:
                raise RewardError(f"rollout.rewards: {name!r} is the name of a reward of its own; choose another")
        wanted = set(reward_names.values())
        parts = {part.reward for name in wanted & self._sums.keys() for part in self._sums[name].parts}
        local = (wanted - self._sums.keys() | parts) - self._judges.keys()
        self._rewards = {name: load_reward(name) for name in sorted(local)}
        if not section.num_workers and (programs := local & RUNS_PROGRAMS):
            raise RewardError(
                f"reward {min(programs)!r} runs programs, for which the controller would wait; set "
                "rollout.rewards.num_workers to at least 1"
            )
        self._pool = RewardPool(section) if section.num_workers else None

    async def __call__(self, prompt: Prompt, response_ids: Sequence[int], is_finished: bool) -> RewardResult:
        name, text = self._names[prompt.source], self._decode(response_ids)
        if name in self._sums:
            return await self._sum(self._sums[name], prompt, text, is_finished)
        return await self._score(name, prompt, text, is_finished)

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))
        if self._pool is not None:
            await self._pool.close()

    async def _score(self, name: str, prompt: Prompt, text: str, is_finished: bool) -> RewardResult:
        if name in self._judges:
            return await self._judges[name].score(prompt, text, is_finished)
        if self._pool is None:
            return self._rewards[name](prompt, text, is_finished)
        return await self._pool.score(name, prompt, text, is_finished)

    async def _sum(self, section: RewardSumSection, prompt: Prompt, text: str, is_finished: bool) -> RewardResult:
        """Side by side; FAILED as soon as one part is. The first part says what is correct."""
        names = [part.reward for part in section.parts]
        results = await asyncio.gather(*(self._score(name, prompt, text, is_finished) for name in names))
        if FAILED in results:
            return FAILED
        total = sum(part.weight * result.reward for part, result in zip(section.parts, results, strict=True))
        details = {name: result.reward for name, result in zip(names, results, strict=True)}
        return RewardResult(total, results[0].is_correct, details)
