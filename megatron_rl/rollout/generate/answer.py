"""What a generate function returns, and how it becomes the segments of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from megatron_rl.rollout.generate.client import GenerateError, Turn
from megatron_rl.types.rollout import FinishReason, Prompt, RolloutSegment


@dataclass(frozen=True, slots=True)
class Answer:
    """All tokens behind the prompt up to the end of the last turn, and which of them get a loss.

    `is_finished`: it ended by itself, which the reward is told. `metrics`: numbers of the function's own; the step reports
    their means as `generate/<name>`.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    is_finished: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


class Transcript:
    """A prompt and what follows it, as ids: turns get a loss, what is inserted between them gets none."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = tuple(prompt.token_ids)
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._end = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the next turn continues."""
        return (*self._prompt, *self._ids)

    def add(self, turn: Turn, has_loss: bool = True) -> None:
        self._ids += turn.token_ids
        self._mask += [has_loss] * len(turn.token_ids)
        self._end = len(self._ids)

    def insert(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        self._mask += [False] * len(token_ids)

    def answer(self, is_finished: bool, metrics: Mapping[str, float]) -> Answer:
        """Up to the last turn: what was inserted behind it was never read by the policy."""
        return Answer(tuple(self._ids[: self._end]), tuple(self._mask[: self._end]), is_finished, dict(metrics))


def finish_segments(prompt: Prompt, segments: Sequence[RolloutSegment], answer: Answer) -> list[RolloutSegment]:
    """The segments as they were sampled and inserted, with the loss mask of the answer and its end.

    Raises GenerateError when the answer does not hold exactly these tokens, or trains on one that nobody sampled.
    """
    name = prompt.prompt_id
    known = tuple(token for segment in segments for token in segment.token_ids)
    if answer.token_ids != known:
        pairs = enumerate(zip(answer.token_ids, known, strict=False))
        place = next((at for at, (new, old) in pairs if new != old), min(len(known), len(answer.token_ids)))
        raise GenerateError(
            f"prompt {name}: the answer has {len(answer.token_ids)} tokens, {len(known)} were sampled and inserted, and they "
            f"differ from token {place} on; return what the turns returned"
        )
    if len(answer.loss_mask) != len(known):
        raise GenerateError(f"prompt {name}: {len(known)} tokens but a loss mask of {len(answer.loss_mask)}")
    finished: list[RolloutSegment] = []
    start = 0
    for segment in segments:
        mask = answer.loss_mask[start : start + len(segment.token_ids)]
        start += len(mask)
        if any(mask) and not segment.is_sampled:
            raise GenerateError(f"prompt {name}: the loss mask trains on tokens that nobody sampled; mask what was inserted")
        finished += _split(segment, mask)
    last = FinishReason.STOP if answer.is_finished else FinishReason.LENGTH
    finished[-1] = replace(finished[-1], finish_reason=last)
    return finished


def _split(segment: RolloutSegment, mask: Sequence[bool]) -> list[RolloutSegment]:
    """One segment per run of equal mask values. Routed experts stay whole with the first: rows are counted from the end."""
    runs = [(value, len(list(same))) for value, same in groupby(mask)]
    if len(runs) == 1:
        return [segment if segment.has_loss == runs[0][0] else replace(segment, has_loss=runs[0][0])]
    parts, start, before = [], 0, 0
    if segment.experts is not None:
        before = len(segment.experts) - len(segment.token_ids)
    for number, (value, count) in enumerate(runs):
        stop = start + count
        rows = None if segment.experts is None else segment.experts[before + start if number else 0 : before + stop]
        reason = segment.finish_reason if stop == len(mask) else FinishReason.SWITCH
        ids, logprobs = segment.token_ids[start:stop], segment.logprobs[start:stop]
        parts.append(replace(segment, token_ids=ids, logprobs=logprobs, finish_reason=reason, experts=rows, has_loss=value))
        start = stop
    return parts
