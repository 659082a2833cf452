"""The table of reward functions. A reward is chosen by name in `data.sources[].reward`."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.types.rollout import Prompt, RewardResult

Score = Callable[[Prompt, str, bool], RewardResult]

REWARDS: dict[str, str] = {
    # name: module:function. Only what is chosen is imported, so that an adapter's library is not needed by the others.
    "exact_match": "megatron_rl.rewards.matching:score_exact_match",
    "last_integer": "megatron_rl.rewards.matching:score_last_integer",
    "math_verify": "megatron_rl.rewards.math_verification:score_math_verify",
    "python_program": "megatron_rl.rewards.programs:score_python_program",
    "reasoning_gym": "megatron_rl.rewards.reasoning_gym_tasks:score_reasoning_gym",
    "reasoning_gym_strict": "megatron_rl.rewards.reasoning_gym_tasks:score_reasoning_gym_strict",
}

RUNS_PROGRAMS = frozenset({"python_program"})
"""Rewards that take seconds: for processes of the pool only."""


class RewardError(ValueError):
    """A response cannot be scored because of the prompt's reference answer or of the reward function itself."""


@dataclass(frozen=True, slots=True)
class CheckedReward:
    """A reward function that never returns a reward which is not finite: training on one NaN ends a run."""

    name: str
    score: Score

    def __call__(self, prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult:
        """Score one response. `is_finished`: it ended by itself (end of sequence), not at the length limit.

        Raises `RewardError` when the prompt cannot be scored.
        """
        result = self.score(prompt, response_text, is_finished)
        if not math.isfinite(result.reward):
            raise RewardError(
                f"reward {self.name!r} returned {result.reward} for prompt {prompt.prompt_id!r} "
                f"of source {prompt.source!r}; rewards must be finite"
            )
        return result


def load_reward(name: str) -> CheckedReward:
    """The reward function called `name`. Raises `RewardError` for an unknown name, with the nearest known one."""
    if name not in REWARDS:
        nearest = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(sorted(REWARDS))}"
        raise RewardError(f"unknown reward {name!r}; {hint}")
    module, function = REWARDS[name].split(":")
    return CheckedReward(name, getattr(importlib.import_module(module), function))


def reference_answer(prompt: Prompt) -> str:
    """The reference answer without outer white space. Raises `RewardError` when nothing is left."""
    answer = prompt.answer.strip()
    if not answer:
        raise RewardError(f"prompt {prompt.prompt_id!r} of source {prompt.source!r} has an empty reference answer")
    return answer
