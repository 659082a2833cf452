"""Which prompts a step trains on: reshuffled epochs of each source, mixed by weight, resumable at any step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.errors import DataError
from megatron_rl.data.mixture import choose_source
from megatron_rl.types.rollout import Prompt


@dataclass(slots=True)
class _SourceCursor:
    """Where one source stands. `deferred` are prompts that the epoch puts last, because the draw in which it began had
    them already."""

    epoch: int = 0
    position: int = 0
    deferred: list[int] = field(default_factory=list)


class PromptSampler:
    """An endless stream of prompts. Deterministic in its inputs; its state is a few numbers.

    Every prompt of a source is drawn once per epoch of that source, in a new order each time. `next` never returns a
    prompt twice in one draw, also where the draw spans two epochs.
    """

    def __init__(self, prompts: Sequence[Sequence[Prompt]], weights: Sequence[float], seed: int) -> None:
        """`prompts[s]` are the prompts of source s and `weights[s]` its share."""
        if not prompts or len(prompts) != len(weights) or not all(prompts):
            raise ValueError("a sampler needs at least one source, one weight for each and no empty source")
        self._prompts = [tuple(source) for source in prompts]
        self._weights = tuple(weights)
        self._seed = seed
        self._counts = [0] * len(prompts)
        self._cursors = [_SourceCursor() for _ in prompts]
        self._orders = [self._shuffled(index) for index in range(len(prompts))]

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` prompts, all different.

        Raises `DataError` when a source has fewer prompts than its share of one draw.
        """
        drawn: list[list[int]] = [[] for _ in self._prompts]
        result = []
        for _ in range(num_prompts):
            source = choose_source(self._weights, self._counts)
            index = self._draw(source, drawn[source])
            drawn[source].append(index)
            self._counts[source] += 1
            result.append(self._prompts[source][index])
        return result

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, JSON-serialisable."""
        return {
            "fingerprint": self._fingerprint(),
            "counts": list(self._counts),
            "cursors": [
                {"epoch": cursor.epoch, "position": cursor.position, "deferred": list(cursor.deferred)}
                for cursor in self._cursors
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `DataError` when that was with other prompts, weights or seed."""
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                "the sampler state was saved with other prompts, weights or seed; restore data.* of the saved run or "
                "start a new one"
            )
        self._counts = list(state["counts"])
        self._cursors = [_SourceCursor(**cursor) for cursor in state["cursors"]]
        self._orders = [self._shuffled(index) for index in range(len(self._prompts))]

    def _draw(self, source: int, drawn: list[int]) -> int:
        cursor = self._cursors[source]
        if cursor.position == len(self._prompts[source]):
            if len(drawn) >= len(self._prompts[source]):
                raise DataError(
                    f"source {self._prompts[source][0].source!r} has {len(drawn)} training prompts, fewer than its "
                    "share of one step; lower run.prompts_per_step or its weight, or give it more prompts"
                )
            self._cursors[source] = cursor = _SourceCursor(cursor.epoch + 1, 0, list(drawn))
            self._orders[source] = self._shuffled(source)
        index = self._orders[source][cursor.position]
        cursor.position += 1
        return index

    def _shuffled(self, source: int) -> list[int]:
        cursor = self._cursors[source]
        order = list(range(len(self._prompts[source])))
        random.Random(f"{self._seed}/{source}/{cursor.epoch}").shuffle(order)
        deferred = set(cursor.deferred)
        return [index for index in order if index not in deferred] + [index for index in order if index in deferred]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self._weights}".encode())
        for source in self._prompts:
            digest.update(f"\n{len(source)}".encode())
            for prompt in source:
                digest.update(f"\n{prompt.prompt_id}\t{prompt.text}".encode())
        return digest.hexdigest()
