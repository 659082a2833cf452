"""What a sample says. The scheduler knows its numbers only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.rollout.generate.conversation import Conversation
from megatron_rl.types.rollout import Prompt, RewardResult, RolloutSegment, Trajectory, TrajectoryState


@dataclass(slots=True)
class SampleContent:
    """With a generate function, `conversation` shares the segments and `program` runs the function."""

    prompt: Prompt
    segments: list[RolloutSegment]
    reward: RewardResult | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    conversation: Conversation | None = None
    program: asyncio.Task[None] | None = None

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the engine continues."""
        return (*self.prompt.token_ids, *self.response_ids)

    @property
    def num_turn_tokens(self) -> int:
        """What the turn that runs has so far; 0 without a generate function."""
        return 0 if self.conversation is None else self.conversation.num_turn_tokens

    @property
    def unused(self) -> list[tuple[int, int]]:
        """(version, number of tokens) that were sampled and get no loss."""
        masked = (segment for segment in self.segments if segment.is_sampled and not segment.has_loss)
        return [(segment.policy_version, len(segment.token_ids)) for segment in masked]

    def to_trajectory(self, sample_id: str) -> Trajectory:
        segments = tuple(self.segments)
        return Trajectory(sample_id, self.prompt, segments, TrajectoryState.DONE, self.reward, self.metrics)
