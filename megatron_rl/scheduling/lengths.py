"""How long the answers to a prompt were: what longest-expected-first sorts by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEW_SHARE = 0.5
"""Weight of a new group's mean over the remembered one: the policy moves, and old lengths go stale."""


class LengthStatistics:
    """A moving mean of response lengths per prompt; prompts never seen get the mean over all groups.

    Two floats per prompt that was seen, resumable.
    """

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._overall = 0.0
        self._num_groups = 0

    def expect(self, prompt_id: str) -> float:
        return self._means.get(prompt_id, self._overall)

    def observe(self, prompt_id: str, mean_tokens: float) -> None:
        """A group is complete."""
        old = self._means.get(prompt_id)
        self._means[prompt_id] = mean_tokens if old is None else old + NEW_SHARE * (mean_tokens - old)
        self._num_groups += 1
        self._overall += (mean_tokens - self._overall) / min(self._num_groups, 1000)

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self._means), "overall": self._overall, "num_groups": self._num_groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = dict(state["means"])
        self._overall, self._num_groups = state["overall"], state["num_groups"]
