"""Prioritised replay of recent groups (arXiv 1511.05952), drawn by how much they still teach. Pure numpy.

Shape suffixes: _S samples, _T tokens of all samples one after another, _Y decoder layers, _K experts per token.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.config.algorithm_sections import ReplaySection
from megatron_rl.types.training import TrainSample

TOKEN_ARRAYS = ("token_ids_L", "loss_mask_L", "rollout_logprobs_L", "versions_L")
SCALARS = ("reward", "advantage", "is_correct", "is_truncated", "num_prompt_tokens")


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The samples of one prompt, with the advantages that they were trained on."""

    samples: tuple[TrainSample, ...]

    @property
    def priority(self) -> float:
        """The mean |advantage|."""
        return float(np.mean([abs(sample.advantage) for sample in self.samples]))


class ReplayBuffer:
    """The groups of the last `num_steps` training steps. Groups without an advantage are not kept."""

    def __init__(self, section: ReplaySection) -> None:
        self._section = section
        self._steps: deque[list[ScoredGroup]] = deque(maxlen=section.num_steps)

    @property
    def is_on(self) -> bool:
        return self._section.num_groups > 0

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
        return [_weighed(kept[index], float(weight)) for index, weight in zip(chosen, weights, strict=True)]

    def state_dict(self) -> dict[str, np.ndarray]:
        """What `load_state_dict` needs: arrays alone (safetensors holds them), names as the bytes of JSON."""
        places = [(number, group) for number, step in enumerate(self._steps) for group in step]
        samples = [sample for _, group in places for sample in group.samples]
        names = {"num_steps": len(self._steps), "samples": [[sample.sample_id, sample.group_id] for sample in samples]}
        state: dict[str, np.ndarray] = {
            "names": np.frombuffer(json.dumps(names).encode(), dtype=np.uint8),
            "step_G": np.array([number for number, _ in places], dtype=np.int64),
            "num_samples_G": np.array([len(group.samples) for _, group in places], dtype=np.int64),
            "lengths_S": np.array([len(sample.token_ids_L) for sample in samples], dtype=np.int64),
        }
        for name in SCALARS:
            state[name] = np.array([getattr(sample, name) for sample in samples])
        for name in TOKEN_ARRAYS:
            state[name] = _join([getattr(sample, name) for sample in samples])
        experts = [sample.experts_LYK for sample in samples if sample.experts_LYK is not None]
        if experts:
            state["has_experts_S"] = np.array([sample.experts_LYK is not None for sample in samples])
            state["experts_TYK"] = _join(experts)
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Hold what another buffer held; of its steps the last `num_steps`."""
        names = json.loads(state["names"].tobytes())
        samples = iter(_unpack(state, names["samples"]))
        steps: list[list[ScoredGroup]] = [[] for _ in range(names["num_steps"])]
        for number, count in zip(state["step_G"].tolist(), state["num_samples_G"].tolist(), strict=True):
            steps[number].append(ScoredGroup(tuple(next(samples) for _ in range(count))))
        self._steps = deque(steps, maxlen=self._section.num_steps)


def _weighed(group: ScoredGroup, weight: float) -> ScoredGroup:
    return ScoredGroup(tuple(replace(sample, advantage=sample.advantage * weight) for sample in group.samples))


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _unpack(state: Mapping[str, np.ndarray], names: Sequence[tuple[str, str]]) -> list[TrainSample]:
    lengths_S = state["lengths_S"]
    tokens = {name: np.split(state[name], np.cumsum(lengths_S)[:-1]) for name in TOKEN_ARRAYS}
    experts: list[np.ndarray | None] = [None] * len(names)
    if "experts_TYK" in state:
        owners = np.flatnonzero(state["has_experts_S"])
        parts = np.split(state["experts_TYK"], np.cumsum(lengths_S[owners])[:-1])
        for owner, part in zip(owners.tolist(), parts, strict=True):
            experts[owner] = part
    samples = []
    for number, (sample_id, group_id) in enumerate(names):
        known: dict[str, Any] = {name: tokens[name][number] for name in TOKEN_ARRAYS}
        known |= {name: state[name][number].item() for name in SCALARS}
        samples.append(TrainSample(sample_id=sample_id, group_id=group_id, experts_LYK=experts[number], **known))
    return samples
