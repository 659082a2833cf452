"""One request on its way through the engine: its tokens, the weight versions that sampled them, its answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.types.rollout import FinishReason, GenerationRequest, PolicyVersion, RolloutSegment

Segments = tuple[RolloutSegment, ...]


@dataclass(slots=True, eq=False)
class Generation:
    """Mutable record of a request. `future` receives the segments, or the error that ended it.

    `token_ids` and `logprobs` are up to date while the generation waits for a slot; in a slot, the pool's rows are.
    `version_starts` holds (version, number of tokens generated before it), one entry per version. `experts` are those of
    all tokens but the last (see `types.routing`), None where the engine records none.
    """

    request: GenerationRequest
    future: Future[Segments] = field(default_factory=Future)
    token_ids: tuple[int, ...] = ()
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    experts: np.ndarray | None = None
    version_starts: list[tuple[PolicyVersion, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = tuple(self.request.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def enter_version(self, version: PolicyVersion, num_generated: int) -> None:
        """The next token is sampled by `version`."""
        if self.version_starts and self.version_starts[-1][1] == num_generated:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, num_generated))

    def finish(self, reason: FinishReason, version: PolicyVersion) -> None:
        """Answer with the segments; `version` is the engine's, for a request that has no token yet."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(build_segments(self, reason, version))


def build_segments(generation: Generation, reason: FinishReason, version: PolicyVersion) -> Segments:
    """One segment per version that sampled at least one token; without tokens, one empty segment with `reason`."""
    tokens = generation.token_ids[generation.num_prompt_tokens :]
    logprobs = generation.logprobs.tolist()
    starts = [(v, start) for v, start in generation.version_starts if start < len(tokens)] or [(version, 0)]
    stops = [start for _, start in starts[1:]] + [len(tokens)]
    segments = []
    for index, ((sampled_by, start), stop) in enumerate(zip(starts, stops, strict=True)):
        why = reason if index == len(starts) - 1 else FinishReason.SWITCH
        first = generation.num_prompt_tokens + start - 1 if index else 0
        experts = None if generation.experts is None else generation.experts[first : generation.num_prompt_tokens + stop - 1]
        segments.append(RolloutSegment(tuple(tokens[start:stop]), tuple(logprobs[start:stop]), sampled_by, why, experts))
    return tuple(segments)
