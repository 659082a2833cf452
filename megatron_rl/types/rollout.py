"""Nouns of generation: what is asked, what was sampled, what it was worth.

A worked example: a `Prompt` asks "2 + 3 =". The group of G=2 trajectories answers it twice. The first
answer was sampled in one go under version 7, so it has one `RolloutSegment`; the second was paused when the
weights moved to version 8, so it has two. Every token therefore knows the version that sampled it. A third one called a
calculator: what the calculator said is a segment between two sampled ones, of no version and without a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

import numpy as np

PolicyVersion = NewType("PolicyVersion", int)
"""Number of weight syncs since the run began; 0 is the warm-started policy."""
NOT_SAMPLED = PolicyVersion(-1)
"""The version of tokens that no policy sampled: what a tool or an environment said."""


class FinishReason(StrEnum):
    """Why a segment ended."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled (it is part of the segment)
    LENGTH = "length"  # max_new_tokens or the context length was reached
    ABORT = "abort"  # cut by pause or abort; the trajectory can be resumed
    SWITCH = "switch"  # the weights changed while it ran; the next segment continues it
    INSERTED = "inserted"  # not sampled: what a tool said between two turns


class TrajectoryState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    AWAY = "away"  # between two turns, at a tool
    DONE = "done"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 means greedy; `top_p` 1 and `top_k` 0 mean the full vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with its reference answer.

    `metadata` is what the reward function of `source` needs beyond `answer`, JSON-serialisable.
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Continue `token_ids` (prompt and whatever was generated before). `seed` fixes the draws of this request alone."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class RolloutSegment:
    """Tokens sampled under one set of weights, with their `rollout_logprobs` (after temperature).

    `experts` (see `types.routing`) are those of the tokens that were the input when the segment's tokens were sampled: its
    last rows are the token before the segment and all of the segment's tokens but the last. The first segment of a
    request has the rows of the request's tokens in front.

    `has_loss`: whether the tokens may be trained on. Inserted ones never are; they have version NOT_SAMPLED and log-prob 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: PolicyVersion
    finish_reason: FinishReason
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    has_loss: bool = True

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"segment has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs")
        if self.has_loss and not self.is_sampled:
            raise ValueError("a segment that no policy sampled has no loss")

    @property
    def is_sampled(self) -> bool:
        return self.policy_version != NOT_SAMPLED


def inserted_segment(token_ids: tuple[int, ...]) -> RolloutSegment:
    """Tokens that a tool or an environment put between two turns."""
    return RolloutSegment(token_ids, (0.0,) * len(token_ids), NOT_SAMPLED, FinishReason.INSERTED, has_loss=False)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is: `kv_fraction` of its KV cache is in use; `num_preempted` requests wait to be prefilled again
    for want of it. `num_prefill_tokens` were computed in `prefill_s` seconds since it started."""

    num_running: int
    num_waiting: int
    kv_fraction: float
    num_preempted: int
    num_prefill_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is what training sees (shaped); `is_correct` is the unshaped metric that filters groups and is reported."""

    reward: float
    is_correct: bool
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prompt and what follows it so far: segments sampled for it and, with tools, inserted ones between them.

    `metrics` are a generate function's own (tool calls and the like); the step reports their means.
    """

    trajectory_id: str
    prompt: Prompt
    segments: tuple[RolloutSegment, ...]
    state: TrajectoryState
    reward: RewardResult | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        return tuple(value for segment in self.segments for value in segment.logprobs)

    @property
    def response_versions(self) -> tuple[int, ...]:
        return tuple(segment.policy_version for segment in self.segments for _ in segment.token_ids)

    @property
    def response_loss_mask(self) -> tuple[bool, ...]:
        """Which tokens of the response may be trained on."""
        return tuple(segment.has_loss for segment in self.segments for _ in segment.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.segments[-1].finish_reason if self.segments else None


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G trajectories of one prompt: the unit of group-relative advantages."""

    group_id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
