"""Where new groups come from: the draw of the data, and prompts whose answers were late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.types.rollout import Prompt

Draw = Callable[[int], Sequence[Prompt]]
"""The next n prompts, all different."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    group_id: str
    prompt: Prompt
    num_samples: int


class PromptSupply:
    """Groups in the order of the draw, a step's worth at a time: in lockstep, group `step-n/p` is trained in step n.

    Tail batching (RollPacker, arXiv 2509.21009): a round releases more groups than a batch takes and is cut when it is
    full. Prompts of groups that still ran are collected here, and when they fill a batch, the next round is theirs: long,
    but long for all of them. So no round waits for one long answer, and no prompt is lost.
    """

    def __init__(self, draw: Draw, groups_per_batch: int, plan_samples: Callable[[Sequence[str]], list[int]]) -> None:
        """`plan_samples`: how many samples each prompt of a draw gets."""
        self._draw, self._groups_per_batch, self._plan_samples = draw, groups_per_batch, plan_samples
        self._drawn: deque[PlannedGroup] = deque()
        self._late: deque[Prompt] = deque()
        self._is_tail_round = False
        self.num_draws = 0
        self.num_tail_rounds = 0

    def begin_round(self) -> bool:
        """Whether the round that begins is one of late prompts."""
        self._is_tail_round = len(self._late) >= self._groups_per_batch
        self.num_tail_rounds += self._is_tail_round
        return self._is_tail_round

    def next(self) -> PlannedGroup:
        if self._is_tail_round and self._late:
            prompt = self._late.popleft()
            (count,) = self._plan_samples([prompt.prompt_id])
            return PlannedGroup(f"tail-{self.num_tail_rounds}/{prompt.prompt_id}", prompt, count)
        if not self._drawn:
            self.num_draws += 1
            prompts = self._draw(self._groups_per_batch)
            counts = self._plan_samples([prompt.prompt_id for prompt in prompts])
            for prompt, count in zip(prompts, counts, strict=True):
                self._drawn.append(PlannedGroup(f"step-{self.num_draws}/{prompt.prompt_id}", prompt, count))
        return self._drawn.popleft()

    def put_late(self, prompt: Prompt) -> None:
        """A group of it ran and was not finished when the batch was cut."""
        self._late.append(prompt)

    def put_back(self, groups: Sequence[PlannedGroup]) -> None:
        """Groups that had no part in the cut: they come first in the next round."""
        self._drawn.extendleft(reversed(groups))
