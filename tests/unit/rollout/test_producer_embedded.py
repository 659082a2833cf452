"""Weights that change under running samples on a real engine: versions and log-probs are those of the weights that sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megatron_rl.rollout.generate.answer import Transcript
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.rollout.producer import Producer
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import ScheduleKind, ScheduleSettings
from megatron_rl.types.rollout import NOT_SAMPLED, Prompt, RewardResult, SamplingParams
from tests.unit.rollout.embedded.engine_models import DENSE, build_engine, fill, hf_model

MAX_NEW, NUM_VERSIONS = 24, 3


@pytest.fixture(scope="module")
def models():
    return [hf_model(DENSE, seed) for seed in range(NUM_VERSIONS)]


async def constant_score():
    return RewardResult(1.0, True)


async def update(engine, model, version: int, pause_mode: str) -> None:
    await engine.pause(pause_mode)
    await engine.load_weights({"phase": "begin"})
    fill(engine.weights, model)
    await engine.load_weights({"phase": "commit", "version": version})
    await engine.resume()


async def talk(client, prompt, sampling):
    """Turns of at most five tokens with three inserted ones between them."""
    transcript = Transcript(prompt)
    while True:
        transcript.add(await client.generate(transcript.token_ids, max_new_tokens=5))
        if client.num_left(transcript.token_ids) < 4:
            return transcript.answer(True, {"num_turns": client.num_turns})
        await asyncio.sleep(0.002)
        transcript.insert([7, 9, 11])


async def collect(models, pause_mode: str, function=None):
    """Batches of an asynchronous run over all versions; the weights move while samples are between 2 and all tokens long."""
    engine = build_engine(models[0], DENSE, num_slots=5, max_context=40)
    settings = ScheduleSettings(2, 2, MAX_NEW, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=NUM_VERSIONS - 1)
    prompts = [Prompt(f"p{i}", "q", tuple(range(3 + i, 8 + 2 * i)), "a", "s") for i in range(4)]
    producer = Producer(
        [engine], RolloutState(settings, [5]), lambda *_: constant_score(),
        SamplingParams(MAX_NEW), lambda count: prompts[:count], seed=3, pause_mode=pause_mode,
        function=function,
    )  # fmt: skip
    try:
        groups = []
        async with asyncio.timeout(120):
            for version in range(1, NUM_VERSIONS):
                groups += (await producer.next_batch())[0]
                target = engine.stats().num_tokens_generated + 12
                while engine.stats().num_tokens_generated < target:
                    await asyncio.sleep(0.001)
                await producer.drain()
                await update(engine, models[version], version, producer.pause_mode)
                producer.on_version(version)
            groups += (await producer.next_batch())[0]
        trajectories = [t for group in groups for t in group.trajectories]
        scores = []
        for model in models:
            await update(engine, model, 100 + len(scores), "abort")
            scores.append(await engine.score([(*t.prompt.token_ids, *t.response_ids) for t in trajectories]))
        return trajectories, scores
    finally:
        await producer.close()
        engine.close()


def gaps(trajectories, scores) -> list[tuple[int, float]]:
    """(how many versions before it the token's own sampled in its trajectory, gap to a scoring pass of that version)."""
    rows = []
    for number, trajectory in enumerate(trajectories):
        start = len(trajectory.prompt.token_ids)
        first = next((v for v in trajectory.response_versions if v != NOT_SAMPLED), 0)
        for position, (version, logprob) in enumerate(
            zip(trajectory.response_versions, trajectory.response_logprobs, strict=True)
        ):
            if version == NOT_SAMPLED:
                assert logprob == 0.0
                continue
            rows.append((version - first, abs(logprob - float(scores[version][number][start + position]))))
    return rows


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_with_dropped_kv_every_token_has_the_log_prob_of_its_own_version(models, pause_mode):
    trajectories, scores = asyncio.run(collect(models, pause_mode))
    rows = gaps(trajectories, scores)
    assert sum(age > 0 for age, _ in rows) > 10  # tokens after a switch
    assert max(gap for _, gap in rows) < 2e-5


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_tokens_of_later_turns_have_the_log_prob_of_their_own_version_behind_what_a_tool_said(models, pause_mode):
    trajectories, scores = asyncio.run(collect(models, pause_mode, GenerateFunction("tests:talk", talk, None, {})))
    rows = gaps(trajectories, scores)
    assert max(trajectory.metrics["num_turns"] for trajectory in trajectories) >= 3
    assert sum(age > 0 for age, _ in rows) > 5
    assert max(gap for _, gap in rows) < 2e-5


def test_with_kept_kv_only_tokens_before_the_first_switch_do(models):
    trajectories, scores = asyncio.run(collect(models, "in_place"))
    rows = gaps(trajectories, scores)
    assert max(gap for age, gap in rows if age == 0) < 2e-5
    assert np.mean([gap for age, gap in rows if age > 0]) > 0.05  # sampled from a mixture of old keys and new weights
