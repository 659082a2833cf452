"""Prioritised replay of recent groups (arXiv 1511.05952), drawn by how much they still teach. Pure numpy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.algorithm_sections import ReplaySection
from megatron_rl.types.rollout import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with the advantages that it was trained on, [G]."""

    group: TrajectoryGroup
    advantages_G: np.ndarray

    @property
    def priority(self) -> float:
        """The mean |advantage|."""
        return float(np.abs(self.advantages_G).mean())


class ReplayBuffer:
    """The groups of the last `num_steps` training steps. Groups without an advantage are not kept."""

    def __init__(self, section: ReplaySection) -> None:
        self._section = section
        self._steps: deque[list[ScoredGroup]] = deque(maxlen=section.num_steps)

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Keep the fresh groups of a step; those of the oldest step are forgotten."""
        self._steps.append([scored for scored in groups if scored.priority > 0])

    def draw(self, rng: np.random.Generator) -> list[ScoredGroup]:
        """`num_groups` different old groups (fewer while there are not so many).

        p_i is in proportion to priority_i^alpha. Each comes with its advantages times (N p_i)^-beta, over the largest
        such weight of the draw: every loss here is linear in the size of the advantage, so this weighs its gradient.
        """
        kept = [scored for step in self._steps for scored in step]
        count = min(self._section.num_groups, len(kept))
        if count == 0:
            return []
        powers = np.array([scored.priority for scored in kept]) ** self._section.alpha
        probabilities = powers / powers.sum()
        chosen = rng.choice(len(kept), size=count, replace=False, p=probabilities)
        weights = (len(kept) * probabilities[chosen]) ** -self._section.beta
        weights /= weights.max()
        return [
            ScoredGroup(kept[index].group, kept[index].advantages_G * weight)
            for index, weight in zip(chosen, weights, strict=True)
        ]
