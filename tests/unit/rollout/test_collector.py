"""The collector on scripted engines."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.collector import Collector, request_seed
from megatron_rl.rollout.generate.answer import Transcript
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.types.rollout import (
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    SamplingParams,
)


class ScriptedEngine:
    """Answers with tokens that are a function of the request's seed; ends requests in an order of its own."""

    def __init__(self, capacity: int, fail_at: int | None = None) -> None:
        self.capacity, self.fail_at = capacity, fail_at
        self.num_running = self.peak = self.num_calls = 0

    async def generate(self, request: GenerationRequest) -> tuple[RolloutSegment, ...]:
        self.num_calls += 1
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        if self.num_calls == self.fail_at:
            raise RuntimeError("engine 1 died")
        length = request.seed % 7 + 1
        for _ in range(length):
            await asyncio.sleep(0)
        self.num_running -= 1
        reason = FinishReason.LENGTH if length == 7 else FinishReason.STOP
        return (RolloutSegment((5,) * length, (-0.5,) * length, PolicyVersion(3), reason),)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"question {i}", (1, 2, i), str(i), "source") for i in range(count)]


async def score(prompt: Prompt, ids, ended: bool) -> RewardResult:
    return RewardResult(float(len(ids)), ended)


def collect(engines, num_prompts=5, samples=3, tag="step-1"):
    collector = Collector(engines, [engine.capacity for engine in engines], score, seed=4)
    return asyncio.run(collector.collect(prompts(num_prompts), samples, SamplingParams(8), tag))


def test_whole_groups_in_prompt_order_with_rewards():
    engines = [ScriptedEngine(2), ScriptedEngine(3)]
    groups = collect(engines)
    assert [group.prompt.prompt_id for group in groups] == [f"p{i}" for i in range(5)]
    assert all(len(group.trajectories) == 3 for group in groups)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.reward.reward == len(trajectory.response_ids)
            assert trajectory.reward.is_correct == (trajectory.finish_reason is FinishReason.STOP)
    assert [engine.peak for engine in engines] == [2, 3]


def test_samples_do_not_depend_on_the_engines():
    one = collect([ScriptedEngine(1)])
    many = collect([ScriptedEngine(4), ScriptedEngine(1), ScriptedEngine(2)])
    assert one == many
    other = collect([ScriptedEngine(1)], tag="step-2")
    assert [t.response_ids for g in one for t in g.trajectories] != [t.response_ids for g in other for t in g.trajectories]


def test_an_engine_error_ends_the_collection():
    with pytest.raises(RuntimeError, match="engine 1 died"):
        collect([ScriptedEngine(2), ScriptedEngine(2, fail_at=2)])


def test_two_prompts_of_one_id_are_refused():
    collector = Collector([ScriptedEngine(2)], [2], score, seed=4)
    with pytest.raises(ValueError, match="prompt id 'p1' is that of 2 prompts; ids must be unique"):
        asyncio.run(collector.collect([*prompts(3), prompts(2)[1]], 1, SamplingParams(8), "eval"))


async def two_turns(client, prompt, sampling):
    transcript = Transcript(prompt)
    transcript.add(await client.generate(transcript.token_ids, max_new_tokens=3))
    transcript.insert([9, 9])
    transcript.add(await client.generate(transcript.token_ids))
    return transcript.answer(True, {"turns": client.num_turns})


def test_a_generate_function_makes_all_turns_on_one_engine():
    asked = []

    class Engine(ScriptedEngine):
        async def generate(self, request):
            asked.append((request.request_id, request.token_ids, request.sampling.max_new_tokens))
            return await super().generate(request)

    function = GenerateFunction("tests:two_turns", two_turns, None, {})
    collector = Collector([Engine(2)], [2], score, 4, function)
    (group,) = asyncio.run(collector.collect(prompts(1), 1, SamplingParams(20), "eval"))
    (trajectory,) = group.trajectories
    length = len(trajectory.segments[0].token_ids)
    assert trajectory.response_ids == (5,) * length + (9, 9) + (5,) * length
    assert trajectory.response_loss_mask == (True,) * length + (False, False) + (True,) * length
    assert trajectory.metrics == {"turns": 2} and trajectory.reward.reward == 2 * length + 2
    assert asked == [
        ("eval/p0/0", (1, 2, 0), 3),
        ("eval/p0/0", (1, 2, 0, *trajectory.response_ids[: length + 2]), 20 - length - 2),
    ]


def test_request_seeds_differ_by_run_and_request():
    seeds = {request_seed(run, f"step-{step}/p{i}/{k}") for run in (1, 2) for step in (1, 2) for i in (1, 11) for k in (0, 1)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
