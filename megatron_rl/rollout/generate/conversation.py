"""One sample of a generate function as a scheduler sees it: it asks for turns, gets them, and ends with an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_rl.rollout.generate.answer import Answer, finish_segments
from megatron_rl.rollout.generate.client import GenerateError
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.types.rollout import Prompt, RolloutSegment, SamplingParams, inserted_segment


class Conversation:
    """Bridges a function that waits for turns and a scheduler that runs them when it will, in as many goes as it takes.

    `segments` belong to the scheduler too: it appends what goes return, this class what the function inserts.
    `on_asked(num_inserted)` is called for every turn that the function wants.
    """

    def __init__(
        self, function: GenerateFunction, prompt: Prompt, sampling: SamplingParams, on_asked: Callable[[int], None]
    ) -> None:
        self.segments: list[RolloutSegment] = []
        self._function, self._prompt, self._sampling, self._on_asked = function, prompt, sampling, on_asked
        self._turn: asyncio.Future[tuple[RolloutSegment, ...]] | None = None
        self._first = 0
        self._asked = asyncio.Event()
        self.sampling = sampling
        """How the turn that runs is to be sampled."""

    @property
    def num_turn_tokens(self) -> int:
        """What the turn that runs has sampled so far."""
        return sum(len(segment.token_ids) for segment in self.segments[self._first :])

    async def first_turn(self) -> None:
        """Until the function has asked for its first turn."""
        await self._asked.wait()

    def end_turn(self) -> None:
        """The turn is complete: the function goes on."""
        assert self._turn is not None
        if not self._turn.done():  # the function may be cancelled
            self._turn.set_result(tuple(self.segments[self._first :]))

    async def run(self) -> Answer:
        """The whole function. `segments` have the answer's loss mask and end afterwards."""
        answer = await self._function(self._prompt, self._sampling, self._run_turn)
        self.segments[:] = finish_segments(self._prompt, self.segments, answer)
        return answer

    async def _run_turn(self, inserted: tuple[int, ...], sampling: SamplingParams) -> tuple[RolloutSegment, ...]:
        if self._turn is not None and not self._turn.done():
            raise GenerateError(f"{self._function.path} asks for a turn of {self._prompt.prompt_id} while one runs")
        if inserted:
            self.segments.append(inserted_segment(inserted))
        self._first, self.sampling = len(self.segments), sampling
        self._turn = asyncio.get_running_loop().create_future()
        self._on_asked(len(inserted))
        self._asked.set()
        return await self._turn
