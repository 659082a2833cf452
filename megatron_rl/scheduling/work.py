"""What is under way: samples and their groups, as numbers. Their tokens live with whoever runs the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_rl.types.rollout import TrajectoryState

Spans = list[tuple[int, int]]
"""(version, number of tokens that it sampled), in order."""


class Fate(StrEnum):
    """What became of a sampled token. Every one has exactly one fate; UNDER_WAY is the only one that changes."""

    UNDER_WAY = "under_way"
    TRAINED = "trained"
    MASKED_OVER_AGE = "masked_over_age"
    MASKED_BY_FUNCTION = "masked_by_function"
    DROPPED_OVER_AGE = "dropped_over_age"
    DROPPED_VERSIONS = "dropped_versions"
    DROPPED_EARLY_STOP = "dropped_early_stop"
    DROPPED_SMALL_GROUP = "dropped_small_group"
    FILTERED_SOLVED = "filtered_solved"
    FILTERED_FAILED = "filtered_failed"


@dataclass(slots=True, eq=False)
class SampleWork:
    """One sample. `oldest_version` is that of the engines when it first started: no token of it is older.

    `order` and `engine` (where its prefix lies) are the queue's; `phase_tokens` is what it got in this phase. `num_tokens`
    were sampled; `num_inserted` more stand between its turns. `unused` are those of `spans` that its generate function
    gives no loss.
    """

    sample_id: str
    group: GroupWork
    index: int
    state: TrajectoryState = TrajectoryState.WAITING
    spans: Spans = field(default_factory=list)
    num_tokens: int = 0
    num_inserted: int = 0
    unused: Spans = field(default_factory=list)
    phase_tokens: int = 0
    oldest_version: int | None = None
    engine: int | None = None
    is_correct: bool | None = None
    fate: Fate = Fate.UNDER_WAY
    """What it was dropped for."""

    @property
    def is_dropped(self) -> bool:
        return self.fate is not Fate.UNDER_WAY

    def add_spans(self, spans: Sequence[tuple[int, int]]) -> int:
        """Append what was sampled; returns its number of tokens."""
        added = 0
        for version, count in spans:
            if count == 0:
                continue
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.spans[-1][1] + count)
            else:
                self.spans.append((version, count))
            added += count
        self.num_tokens += added
        self.phase_tokens += added
        return added


@dataclass(slots=True, eq=False)
class GroupWork:
    """The samples of one prompt. `serial` counts groups since the run began; `samples` are those not dropped."""

    group_id: str
    prompt_id: str
    serial: int
    expected_tokens: float
    samples: list[SampleWork] = field(default_factory=list)
    num_open: int = 0
    """Samples that are not scored yet."""
    oldest_version: int | None = None
    """The version under which the first of its samples started; None: none has."""
