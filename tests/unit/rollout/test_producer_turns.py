"""Generate functions under the real scheduler: pauses inside and between turns, new weights, drops; token by token."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.collector import request_seed
from megatron_rl.rollout.generate.answer import Answer, Transcript
from megatron_rl.rollout.generate.client import GenerateError
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.scheduling.settings import OverAge, ScheduleKind
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import NOT_SAMPLED, FinishReason
from tests.unit.rollout.scripted_producer import MAX_NEW, Run, ScriptedEngine, run

TURN_TOKENS, NUM_TURNS, STOP_EVERY = 5, 3, 7


class TurnEngine(ScriptedEngine):
    """A turn ends by itself where the seed says so."""

    def __init__(self, slow=1):
        super().__init__(slow)
        self.visits = []

    def stops_at(self, seed, position):
        return (seed + position) % STOP_EVERY == 0

    async def generate(self, request):
        self.visits.append(request.request_id)
        return await super().generate(request)


async def talk(client, prompt, sampling):
    """Up to three turns with one, two tokens between them; the second turn gets no loss."""
    assert sampling.max_new_tokens == MAX_NEW
    transcript = Transcript(prompt)
    number = 0
    while True:
        transcript.add(await client.generate(transcript.token_ids, max_new_tokens=TURN_TOKENS), has_loss=number != 1)
        number += 1
        for _ in range(3 * number):
            await asyncio.sleep(0)  # a tool
        if number == NUM_TURNS or client.num_left(transcript.token_ids) <= number:
            return transcript.answer(number == NUM_TURNS, {"num_turns": number})
        transcript.insert([2000 + number] * number)


FUNCTION = GenerateFunction("tests:talk", talk, None, {})


def expected_answer(seed):
    """(tokens, mask, sampled) of `talk` in one go."""
    ids, mask, sampled, number = [], [], [], 0
    while True:
        for _ in range(TURN_TOKENS):
            ids.append((seed + len(ids)) % 1000)
            mask.append(number != 1)
            sampled.append(True)
            if (seed + len(ids)) % STOP_EVERY == 0 or len(ids) == MAX_NEW:
                break
        number += 1
        if number == NUM_TURNS or MAX_NEW - len(ids) <= number:
            return tuple(ids), tuple(mask), sampled
        ids += [2000 + number] * number
        mask += [False] * number
        sampled += [False] * number


def check_turns(made, batches):
    """Every trajectory holds what one go would have sampled, each token with its version; the account adds up."""
    num_loss = num_sampled = 0
    for _, groups, _ in batches:
        for trajectory in (t for group in groups for t in group.trajectories):
            seed = request_seed(4, trajectory.trajectory_id)
            ids, mask, sampled = expected_answer(seed)
            assert trajectory.response_ids == ids and trajectory.response_loss_mask == mask
            versions = trajectory.response_versions
            assert [v != NOT_SAMPLED for v in versions] == sampled
            by_policy = [v for v in versions if v != NOT_SAMPLED]
            assert by_policy == sorted(by_policy)
            for version, logprob in zip(versions, trajectory.response_logprobs, strict=True):
                assert logprob == (0.0 if version == NOT_SAMPLED else -float(version) - 1)
            finished = trajectory.metrics["num_turns"] == NUM_TURNS
            assert trajectory.finish_reason is (FinishReason.STOP if finished else FinishReason.LENGTH)
            assert trajectory.reward.reward == len(ids)
            num_loss += sum(mask)
            num_sampled += sum(sampled)
    tokens = made.state.ledger.tokens
    trained = [tokens[fate] for fate in (Fate.TRAINED, Fate.MASKED_OVER_AGE, Fate.MASKED_BY_FUNCTION)]
    assert sum(trained) == num_sampled
    if made.state.settings.over_age is not OverAge.MASK:
        assert tokens[Fate.TRAINED] == num_loss
    assert made.state.ledger.num_sampled == sum(tokens.values())


def turns(count, **options):
    async def go():
        made = Run([TurnEngine(1), TurnEngine(3)], (3, 5), function=FUNCTION, **options)
        batches = await made.batches(count, train_turns=4)
        assert not any(content.program and not content.program.done() for content in made.producer._content.values())
        return made, batches

    return asyncio.run(go())


def sampled_ages(batches):
    trajectories = [(v, t) for v, groups, _ in batches for g in groups for t in g.trajectories]
    return [v - by for v, t in trajectories for by in t.response_versions if by != NOT_SAMPLED]


def test_lockstep_repeats_itself_with_turns():
    made, batches = turns(4)
    check_turns(made, batches)
    assert {t.metrics["num_turns"] for _, groups, _ in batches for g in groups for t in g.trajectories} == {2, 3}
    visits = [visit for engine in made.engines for visit in engine.visits]
    assert len(visits) > 2 * len(set(visits))


def test_a_turn_rather_returns_to_the_engine_that_has_its_prefix():
    async def go():
        made = Run([TurnEngine(), TurnEngine()], (20, 20), function=FUNCTION)  # room for all: nothing is stolen
        await made.batches(2)
        return made

    made = asyncio.run(go())
    assert made.engines[0].visits and not set(made.engines[0].visits) & set(made.engines[1].visits)


@pytest.mark.parametrize("pause_mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("over_age", list(OverAge))
def test_weights_change_within_and_between_turns(pause_mode, over_age):
    made, batches = turns(12, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=1, over_age=over_age, pause_mode=pause_mode)
    check_turns(made, batches)
    trajectories = [t for _, groups, _ in batches for g in groups for t in g.trajectories]
    assert any(len({v for v in t.response_versions if v != NOT_SAMPLED}) > 1 for t in trajectories)
    if over_age is not OverAge.MASK:
        assert max(sampled_ages(batches)) <= 1


def test_a_budget_per_phase_cuts_turns_without_a_loss():
    made, batches = turns(6, phase_tokens=2, oversample=2.0, max_staleness=3, pause_mode="abort")
    check_turns(made, batches)
    assert max(len(s.token_ids) for _, gs, _ in batches for g in gs for t in g.trajectories for s in t.segments) <= 2


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("raises", KeyError, "tool"),
        ("returns_text", GenerateError, "tests:broken returned str, expected an Answer"),
        ("takes_no_turn", GenerateError, "tests:broken returned for prompt p4 without a turn of the engine"),
        ("changes_tokens", GenerateError, "the answer has 1 tokens, . were sampled and inserted"),
    ],
)
def test_a_broken_function_is_raised_where_the_batch_is_awaited(broken, error, message):
    async def function(client, prompt, sampling):
        if broken == "takes_no_turn":
            return Answer((), (), True)
        await client.generate(prompt.token_ids, max_new_tokens=4)
        if broken == "raises":
            raise KeyError("tool")
        return "text" if broken == "returns_text" else Answer((5,), (True,), True)

    with pytest.raises(error, match=message):
        run(1, slow=(1,), limits=(2,), function=GenerateFunction("tests:broken", function, None, {}))
