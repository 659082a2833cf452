"""What a generate function gets: an engine that continues token ids, and nothing that could change them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_rl.types.rollout import FinishReason, Prompt, RolloutSegment, SamplingParams


class GenerateError(ValueError):
    """A generate function is not what it should be; the message is one line."""


class TextCodec(Protocol):
    """Text <-> token ids, for what tools read and say (see `data.tokenizer.Tokenizer`).

    `encode` is for marks of the experiment's own, special tokens included; `encode_foreign` for what a tool said.
    """

    def encode(self, text: str) -> list[int]: ...

    def encode_foreign(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine sampled for one call: ids, log-probs and versions, one segment per version or pause."""

    segments: tuple[RolloutSegment, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """STOP: a stop token ended it. LENGTH: its budget or the room behind the prompt did."""
        return self.segments[-1].finish_reason if self.segments else FinishReason.LENGTH


RunTurn = Callable[[tuple[int, ...], SamplingParams], Awaitable[tuple[RolloutSegment, ...]]]
"""(what was inserted since the last turn, how to sample) -> what was sampled. Whoever runs it knows what stands before."""


class EngineClient:
    """The engine as one sample sees it. Pauses, new weights and a change of engines happen behind `generate`.

    `options`: `rollout.generate.options`, as the function's `options_type` where it has one.
    """

    def __init__(self, prompt: Prompt, sampling: SamplingParams, text: TextCodec, options: Any, run_turn: RunTurn) -> None:
        self.text, self.options = text, options
        self.num_turns = 0
        self._name, self._sampling, self._run_turn = prompt.prompt_id, sampling, run_turn
        self._known = tuple(prompt.token_ids)
        self._most = len(prompt.token_ids) + sampling.max_new_tokens

    def num_left(self, token_ids: Sequence[int]) -> int:
        """How many more tokens there is room for behind `token_ids`: `max_new_tokens` counts all turns and what tools say."""
        return self._most - len(token_ids)

    async def generate(
        self, token_ids: Sequence[int], *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Turn:
        """Continue `token_ids`: the prompt, all turns as they were sampled, and what was inserted since the last one.

        `max_new_tokens` bounds this turn (None: as much as there is room for); `stop_token_ids` end it beside the usual
        ones. Raises GenerateError when what was there before is not repeated token by token (text that is tokenised again
        rarely gives the tokens that were sampled), or when there is no room for a token.
        """
        token_ids = tuple(token_ids)
        if token_ids[: len(self._known)] != self._known:
            pairs = enumerate(zip(token_ids, self._known, strict=False))
            place = next((at for at, (new, old) in pairs if new != old), len(token_ids))
            raise GenerateError(
                f"prompt {self._name}: turn {self.num_turns + 1} changes token {place} of the {len(self._known)} before it; "
                "append to them and tokenise nothing again"
            )
        left = self.num_left(token_ids)
        if left < 1:
            raise GenerateError(
                f"prompt {self._name}: no room for turn {self.num_turns + 1} behind {len(token_ids)} tokens (at most "
                f"{self._most}); ask num_left first"
            )
        limit = left if max_new_tokens is None else min(left, max_new_tokens)
        stops = (*self._sampling.stop_token_ids, *stop_token_ids)
        sampling = replace(self._sampling, max_new_tokens=limit, stop_token_ids=stops)
        self.num_turns += 1
        turn = Turn(await self._run_turn(token_ids[len(self._known) :], sampling))
        self._known = (*token_ids, *turn.token_ids)
        return turn
