"""Prompts by what they can teach: more candidates than are trained are drawn, and the pass rates so far choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.sections import CurriculumSection
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.types.rollout import Prompt


class CurriculumSampler:
    """Stands before a `PromptSampler`. Whoever sees groups complete tells `curriculum`; this class reads it.

    A candidate that is not chosen comes again in the next epoch of its source. Deterministic in its inputs, resumable.
    """

    def __init__(self, sampler: PromptSampler, curriculum: Curriculum, section: CurriculumSection) -> None:
        self.curriculum = curriculum
        self._sampler, self._section = sampler, section
        self._num_draws = 0
        self._drawn: Sequence[Prompt] = ()

    @property
    def level(self) -> int:
        """The hardest bin that is open, from 0; always the last one unless the order is from easy to hard."""
        last = self._section.num_bins - 1
        if self._section.order == "mixed":
            return last
        return min(self._num_draws // self._section.draws_per_bin, last)

    def next(self, num_prompts: int) -> list[Prompt]:
        """`num_prompts` different prompts of about `num_candidates` times as many, with probability proportional to p(1-p).

        From easy to hard, prompts of bins that are not open yet are taken only where others are too few. Raises
        `DataError` when a source has fewer prompts than its share of one draw.
        """
        candidates: dict[str, Prompt] = {}
        for _ in range(self._section.num_candidates):
            candidates |= {prompt.prompt_id: prompt for prompt in self._sampler.next(num_prompts)}
        names = list(candidates)
        open_names = self._open(names, num_prompts)
        chosen = [open_names[position] for position in self.curriculum.choose(open_names, num_prompts)]
        self._num_draws += 1
        self._drawn = [candidates[name] for name in chosen]
        return list(self._drawn)

    def metrics(self) -> dict[str, float]:
        """Of the last draw: the mean pass rate that was known of its prompts, and how many had none yet."""
        rates = [self.curriculum.pass_rate(prompt.prompt_id) for prompt in self._drawn if self._is_known(prompt)]
        return {
            "curriculum/pass_rate": sum(rates) / len(rates) if rates else 0.5,
            "curriculum/known_fraction": len(rates) / max(len(self._drawn), 1),
            "curriculum/num_known": float(self.curriculum.num_known),
            "curriculum/level": float(self.level),
        }

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, JSON-serialisable: the sampler's state beside the curriculum's."""
        return {
            "sampler": self._sampler.state_dict(),
            "curriculum": self.curriculum.state_dict(),
            "num_draws": self._num_draws,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `DataError` when that was with other prompts, weights or seed."""
        self._sampler.load_state_dict(state["sampler"])
        self.curriculum.load_state_dict(state["curriculum"])
        self._num_draws = state["num_draws"]

    def _open(self, names: Sequence[str], num_prompts: int) -> list[str]:
        """The candidates of the open bins, and of as many harder ones as it takes."""
        positions: list[int] = []
        for number, members in enumerate(self.curriculum.bins(names, self._section.num_bins)):
            if number > self.level and len(positions) >= num_prompts:
                break
            positions += members
        return [names[position] for position in sorted(positions)]

    def _is_known(self, prompt: Prompt) -> bool:
        return self.curriculum.is_known(prompt.prompt_id)
