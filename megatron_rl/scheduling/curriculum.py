"""Which prompts are worth an answer now, and how many: from the pass rate of each one so far.

The gradient of a binary reward vanishes where a prompt is always or never solved; its variance, p(1-p), says how much a
sample can teach. Pass rates are Beta posteriors whose evidence fades, since the policy moves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

PRIOR = 1.0
"""Successes and failures that every prompt is taken to have had: a uniform prior."""
MEMORY = 0.7
"""What remains of the old evidence when a new group comes."""


class Curriculum:
    """Pass-rate statistics of the prompts seen so far. Two floats per prompt; resumable; draws depend on `seed` alone."""

    def __init__(self, seed: int) -> None:
        self._counts: dict[str, tuple[float, float]] = {}
        self._random = random.Random(seed)

    def observe(self, prompt_id: str, num_correct: int, num_samples: int) -> None:
        """A group is complete."""
        correct, wrong = self._counts.get(prompt_id, (0.0, 0.0))
        self._counts[prompt_id] = (
            MEMORY * correct + num_correct,
            MEMORY * wrong + num_samples - num_correct,
        )

    @property
    def num_known(self) -> int:
        """Prompts of which a group is complete."""
        return len(self._counts)

    def is_known(self, prompt_id: str) -> bool:
        return prompt_id in self._counts

    def pass_rate(self, prompt_id: str) -> float:
        """The posterior mean; 0.5 for a prompt never seen."""
        a, b = self._posterior(prompt_id)
        return a / (a + b)

    def weight(self, prompt_id: str) -> float:
        """The posterior mean of p(1-p): a prompt never seen has 1/6, one that is always solved goes to 0."""
        a, b = self._posterior(prompt_id)
        return a * b / ((a + b) * (a + b + 1))

    def choose(self, prompt_ids: Sequence[str], num_prompts: int) -> list[int]:
        """Positions of `num_prompts` of the candidates, in their order, drawn without replacement with probability
        proportional to `weight` (Efraimidis and Spirakis, 2006)."""
        if num_prompts > len(prompt_ids):
            raise ValueError(f"{num_prompts} prompts wanted of {len(prompt_ids)} candidates")
        keys = [self._random.random() ** (1.0 / self.weight(prompt_id)) for prompt_id in prompt_ids]
        return sorted(sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:num_prompts])

    def budget(self, prompt_ids: Sequence[str], num_samples: int, minimum: int = 2) -> list[int]:
        """Samples for each prompt: `minimum`, and the rest in proportion to `weight` (largest remainders)."""
        spare = num_samples - minimum * len(prompt_ids)
        if spare < 0:
            raise ValueError(f"{num_samples} samples are fewer than {minimum} for each of {len(prompt_ids)} prompts")
        if not prompt_ids:
            return []
        weights = [self.weight(prompt_id) for prompt_id in prompt_ids]
        shares = [spare * weight / sum(weights) for weight in weights]
        counts = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
        for position in by_remainder[: spare - sum(counts)]:
            counts[position] += 1
        return [minimum + count for count in counts]

    def bins(self, prompt_ids: Sequence[str], num_bins: int) -> list[list[int]]:
        """Positions in `num_bins` bins of equal width in the pass rate, from easy to hard."""
        filled: list[list[int]] = [[] for _ in range(num_bins)]
        for position, prompt_id in enumerate(prompt_ids):
            filled[min(int((1.0 - self.pass_rate(prompt_id)) * num_bins), num_bins - 1)].append(position)
        return filled

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, JSON-serialisable."""
        version, internal, gauss = self._random.getstate()
        return {"counts": {k: list(v) for k, v in self._counts.items()}, "random": [version, list(internal), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {prompt_id: (counts[0], counts[1]) for prompt_id, counts in state["counts"].items()}
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))

    def _posterior(self, prompt_id: str) -> tuple[float, float]:
        correct, wrong = self._counts.get(prompt_id, (0.0, 0.0))
        return PRIOR + correct, PRIOR + wrong
