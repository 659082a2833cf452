"""Runs given prompts on engines until all are answered and rewarded: evaluation. Training goes through `producer`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.rollout.generate.answer import Answer, finish_segments
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.scheduling.dispatch import DispatchQueue
from megatron_rl.scheduling.length_bias import LengthBias
from megatron_rl.types.protocols import GenerationEngine
from megatron_rl.types.rollout import (
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardResult,
    RolloutSegment,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    TrajectoryState,
    inserted_segment,
)

Scorer = Callable[[Prompt, Sequence[int], bool], Awaitable[RewardResult]]
"""(prompt, response token ids, ended by itself) -> reward."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What one batch took. `generate_s` is the time that the loop waited for it less `reward_s`, in which nothing ran any
    more and only rewards were missing.

    `efficiency` is busy slot-time over slot-time since generation began (in lockstep) or since the last batch; it falls
    with the long tail. `num_tokens` were sampled in that time, `token_fates` says what became of tokens in it (by
    `scheduling.work.Fate`; those still under way count as they change). `length_bias` is of the last few thousand samples.
    """

    generate_s: float
    reward_s: float
    num_tokens: int
    tokens_per_s: float
    efficiency: float
    token_fates: Mapping[str, int]
    length_bias: LengthBias


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    group: int
    index: int
    prompt: Prompt
    request: GenerationRequest


class Collector:
    """Feeds a shared queue of samples to the engines and scores each sample as it finishes.

    `capacities[e]` is how many requests engine e runs at once.
    """

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        capacities: Sequence[int],
        score: Scorer,
        seed: int,
        function: GenerateFunction | None = None,
    ) -> None:
        """`function` None: an answer is one turn."""
        self._engines = engines
        self._capacities = capacities
        self._score = score
        self._seed = seed
        self._function = function

    async def collect(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: SamplingParams, tag: str
    ) -> list[TrajectoryGroup]:
        """All samples of all prompts, in the order of the prompts. `tag` names the draw: equal tags draw equal samples.

        The first engine error is raised at once; requests still running are cancelled. Raises ValueError when two prompts
        have one id: their samples would have one name and one seed.
        """
        for prompt_id, count in Counter(prompt.prompt_id for prompt in prompts).items():
            if count > 1:
                raise ValueError(f"prompt id {prompt_id!r} is that of {count} prompts; ids must be unique")
        queue: DispatchQueue[_Sample] = DispatchQueue(self._capacities)
        for group, prompt in enumerate(prompts):
            for index in range(samples_per_prompt):
                request_id = f"{tag}/{prompt.prompt_id}/{index}"
                seed = request_seed(self._seed, request_id)
                queue.put(_Sample(group, index, prompt, GenerationRequest(request_id, prompt.token_ids, sampling, seed)))
        slots: list[list[Trajectory | None]] = [[None] * samples_per_prompt for _ in prompts]

        async def worker(engine: int) -> None:
            while (sample := queue.pull(engine)) is not None:
                trajectory = await self._answer(self._engines[engine], sample)
                ended = trajectory.finish_reason is FinishReason.STOP
                reward = await self._score(sample.prompt, trajectory.response_ids, ended)
                slots[sample.group][sample.index] = replace(trajectory, reward=reward)
                queue.finish(engine)

        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in range(max(self._capacities)):  # slot-major: the engines fill up side by side
                    for engine, capacity in enumerate(self._capacities):
                        if slot < capacity:
                            tasks.create_task(worker(engine))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [
            TrajectoryGroup(f"{tag}/{prompt.prompt_id}", prompt, tuple(t for t in row if t is not None))
            for prompt, row in zip(prompts, slots, strict=True)
        ]

    async def _answer(self, engine: GenerationEngine, sample: _Sample) -> Trajectory:
        name, prompt = sample.request.request_id, sample.prompt
        if self._function is None:
            return Trajectory(name, prompt, await engine.generate(sample.request), TrajectoryState.DONE)
        segments, answer = await _converse(self._function, engine, prompt, sample.request)
        return Trajectory(name, prompt, segments, TrajectoryState.DONE, metrics=answer.metrics)


async def _converse(
    function: GenerateFunction, engine: GenerationEngine, prompt: Prompt, request: GenerationRequest
) -> tuple[tuple[RolloutSegment, ...], Answer]:
    """One sample of a generate function, all turns on one engine."""
    segments: list[RolloutSegment] = []

    async def run_turn(inserted: tuple[int, ...], sampling: SamplingParams) -> tuple[RolloutSegment, ...]:
        if inserted:
            segments.append(inserted_segment(inserted))
        before = [token for segment in segments for token in segment.token_ids]
        turn = await engine.generate(replace(request, token_ids=(*prompt.token_ids, *before), sampling=sampling))
        segments.extend(turn)
        return turn

    answer = await function(prompt, request.sampling, run_turn)
    return tuple(finish_segments(prompt, segments, answer)), answer


def request_seed(seed: int, request_id: str) -> int:
    """A 63-bit seed of one request: a function of the run's seed and the request's name alone."""
    words = np.frombuffer(request_id.encode().ljust(-(-len(request_id.encode()) // 4) * 4, b"\0"), dtype=np.uint32)
    state = np.random.SeedSequence([seed, *words.tolist()]).generate_state(1, dtype=np.uint64)
    return int(state[0] >> np.uint64(1))
