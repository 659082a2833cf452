"""The Protocols where mechanisms meet. Each has at most five methods; each has a greppable table of implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from megatron_rl.types.rollout import GenerationRequest, PolicyVersion, Prompt, RewardResult, RolloutSegment


@runtime_checkable
class GenerationEngine(Protocol):
    """One inference engine (all of its tensor-parallel ranks)."""

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        """Sample until stop, length or abort. One segment per weight version that sampled a part of the answer."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop sampling. `abort` returns running requests with what they have; `retract` and `in_place` keep them."""
        ...

    async def resume(self) -> None:
        """Sample again. Raises `EngineDirtyError` while the weights are not one whole version."""
        ...

    async def load_weights(self, update: Mapping[str, Any]) -> PolicyVersion:
        """Run one phase of a weight update (`begin`, `commit`, `abandon`); returns the version that the engine holds."""
        ...

    async def policy_version(self) -> PolicyVersion:
        """The version of the weights that sample now."""
        ...


class RewardFn(Protocol):
    """Text and reference answer -> reward. Deterministic, no state. `is_finished`: the answer ended by itself."""

    def __call__(self, prompt: Prompt, response_text: str, is_finished: bool) -> RewardResult: ...


class MetricSink(Protocol):
    """Where metrics go. `record` takes scalars, `text` takes a few samples per step."""

    def record(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, lines: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class EngineDirtyError(RuntimeError):
    """An engine holds a mixture of weight versions after a failed sync and refuses to sample."""
