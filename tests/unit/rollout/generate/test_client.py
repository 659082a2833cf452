"""What a generate function may ask of the engine, and how its answer becomes segments."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megatron_rl.rollout.generate.answer import Answer, Transcript, finish_segments
from megatron_rl.rollout.generate.client import EngineClient, GenerateError
from megatron_rl.types.rollout import (
    FinishReason,
    PolicyVersion,
    Prompt,
    RolloutSegment,
    SamplingParams,
    inserted_segment,
)

PROMPT = Prompt("p", "q", (1, 2, 3), "a", "s")


class Engine:
    def __init__(self):
        self.asked = []

    async def run_turn(self, inserted, sampling):
        self.asked.append((inserted, sampling.max_new_tokens, sampling.stop_token_ids))
        return (RolloutSegment((7, 8), (-1.0, -2.0), PolicyVersion(len(self.asked)), FinishReason.STOP),)


def client_of(engine, most=9):
    return EngineClient(PROMPT, SamplingParams(most, stop_token_ids=(0,)), None, {}, engine.run_turn)


def test_turns_continue_what_was_there():
    async def go():
        engine = Engine()
        client, transcript = client_of(engine), Transcript(PROMPT)
        transcript.add(await client.generate(transcript.token_ids, max_new_tokens=4))
        transcript.insert([50, 51])
        transcript.add(await client.generate(transcript.token_ids, stop_token_ids=[9]), has_loss=False)
        transcript.insert([52])
        return engine, client, transcript

    engine, client, transcript = asyncio.run(go())
    assert engine.asked == [((), 4, (0,)), ((50, 51), 5, (0, 9))]
    assert transcript.token_ids == (1, 2, 3, 7, 8, 50, 51, 7, 8, 52)
    assert client.num_turns == 2 and client.num_left(transcript.token_ids) == 2
    answer = transcript.answer(True, {"calls": 1})
    assert answer == Answer((7, 8, 50, 51, 7, 8), (True, True, False, False, False, False), True, {"calls": 1})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((1, 2, 3, 7, 9, 50), "prompt p: turn 2 changes token 4 of the 5 before it; append to them"),
        ((1, 2, 3, 7), "prompt p: turn 2 changes token 4 of the 5 before it"),
        ((1, 2, 3, 7, 8, *range(7)), "prompt p: no room for turn 2 behind 12 tokens .at most 12.; ask num_left first"),
    ],
)
def test_what_was_there_cannot_change(second, message):
    async def go():
        client = client_of(Engine())
        await client.generate((1, 2, 3))
        await client.generate(second)

    with pytest.raises(GenerateError, match=message):
        asyncio.run(go())


def segments(experts=None):
    first = RolloutSegment((7, 8, 9), (-1.0, -2.0, -3.0), PolicyVersion(4), FinishReason.STOP, experts)
    return [first, inserted_segment((50,)), RolloutSegment((6,), (-4.0,), PolicyVersion(5), FinishReason.ABORT)]


def test_the_loss_mask_splits_segments_and_changes_nothing_else():
    experts = np.arange(5 * 2).reshape(5, 2, 1)  # of the prompt's 3 tokens and two of the answer
    finished = finish_segments(PROMPT, segments(experts), Answer((7, 8, 9, 50, 6), (True, False, False, False, True), False))
    assert [(s.token_ids, s.logprobs, s.policy_version, s.has_loss) for s in finished] == [
        ((7,), (-1.0,), 4, True),
        ((8, 9), (-2.0, -3.0), 4, False),
        ((50,), (0.0,), -1, False),
        ((6,), (-4.0,), 5, True),
    ]
    reasons = [FinishReason.SWITCH, FinishReason.STOP, FinishReason.INSERTED, FinishReason.LENGTH]
    assert [s.finish_reason for s in finished] == reasons
    assert np.array_equal(np.concatenate([finished[0].experts, finished[1].experts]), experts)
    assert len(finished[1].experts) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer((7, 8, 9, 50), (True,) * 4, True), "4 tokens, 5 were sampled and inserted, and they differ from token 4 on"),
        (Answer((7, 8, 8, 50, 6), (True,) * 5, True), "differ from token 2 on; return what the turns returned"),
        (Answer((7, 8, 9, 50, 6), (True,) * 4, True), "5 tokens but a loss mask of 4"),
        (Answer((7, 8, 9, 50, 6), (True,) * 5, True), "trains on tokens that nobody sampled; mask what was inserted"),
    ],
)
def test_an_answer_that_is_not_what_was_sampled_is_refused(answer, message):
    with pytest.raises(GenerateError, match=message):
        finish_segments(PROMPT, segments(), answer)
