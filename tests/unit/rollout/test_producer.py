"""The producer on scripted engines: what comes out is what they sampled, in whole groups, by every schedule."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from megatron_rl.rollout.collector import request_seed
from megatron_rl.rollout.producer import Producer
from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import (
    EngineLoad,
    FinishReason,
    PolicyVersion,
    Prompt,
    RewardResult,
    RolloutSegment,
    SamplingParams,
)

MAX_NEW = 12
PROMPT = (1, 2, 3)


def answer_length(seed: int) -> int:
    return seed % (MAX_NEW + 3) + 1


class ScriptedEngine:
    """Token t of a request is a function of its seed and t; its log-prob also of the version. `slow` turns of the event
    loop per token."""

    def __init__(self, slow: int = 1) -> None:
        self.slow, self.version = slow, PolicyVersion(0)
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.pauses: list[str] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.peak = 0
        self.aborts = 0
        self.kv_fraction = 0.1

    def stops_at(self, seed, position):
        return position == answer_length(seed)

    async def generate(self, request):
        self.running.add(request.request_id)
        self.peak = max(self.peak, len(self.running))
        tokens, aborts = [], self.aborts
        reason = FinishReason.ABORT
        position = len(request.token_ids) - len(PROMPT)
        try:
            while self.aborts == aborts:
                for _ in range(self.slow):
                    await asyncio.sleep(0)
                await self.may_run.wait()
                if self.aborts != aborts:
                    break
                tokens.append((request.seed + position, self.version))
                position += 1
                if self.stops_at(request.seed, position):
                    reason = FinishReason.STOP
                    break
                if len(tokens) == request.sampling.max_new_tokens:
                    reason = FinishReason.LENGTH
                    break
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)
        return self.to_segments(tokens, reason)

    def to_segments(self, tokens, reason):
        segments = []
        for version in sorted({version for _, version in tokens}) or [self.version]:
            ids = tuple(token % 1000 for token, by in tokens if by == version)
            segments.append(RolloutSegment(ids, (-float(version) - 1.0,) * len(ids), version, FinishReason.SWITCH))
        last = segments[-1]
        segments[-1] = RolloutSegment(last.token_ids, last.logprobs, last.policy_version, reason)
        return tuple(segments)

    async def pause(self, mode):
        self.pauses.append(mode)
        self.may_run.clear()
        if mode == "abort":
            self.aborts += 1
            self.may_run.set()
            await asyncio.sleep(0)
            while self.running:
                await asyncio.sleep(0)
            self.may_run.clear()

    async def resume(self):
        self.may_run.set()

    async def load(self):
        return EngineLoad(len(self.running), 0, self.kv_fraction, 0, 1000, 1.0)


def score_now(prompt, ids, ended):
    return RewardResult(float(len(ids)), sum(ids) % 2 == 0)


async def score(prompt, ids, ended):
    return score_now(prompt, ids, ended)


async def score_by_prompt(prompt, ids, ended):
    await asyncio.sleep(0)
    return RewardResult(0.0, prompt.prompt_id < "p3")


class Run:
    def __init__(
        self, engines, limits, *, pause_mode="retract", seed=4, prompts=7, score=score, windows=(), function=None,
        curriculum=None, phase_s=None, tail_rounds=False, **settings,
    ):  # fmt: skip
        defaults = {"groups_per_batch": 4, "samples_per_group": 3, "max_new_tokens": MAX_NEW}
        self.engines = engines
        self.state = RolloutState(ScheduleSettings(**{**defaults, **settings}), limits, curriculum=curriculum)
        self.drawn = 0

        def draw(count):
            self.drawn += count
            return [Prompt(f"p{(self.drawn + i) % prompts}", "q", PROMPT, "a", "s") for i in range(count)]

        self.producer = Producer(
            engines,
            self.state,
            score,
            SamplingParams(MAX_NEW),
            draw,
            seed,
            pause_mode=pause_mode,
            windows=windows,
            function=function,
            phase_s=phase_s,
            tail_rounds=tail_rounds,
        )
        self.version = 0

    async def publish(self):
        await self.producer.drain()
        for engine in self.engines:
            await engine.pause(self.producer.pause_mode)
        self.version += 1
        for engine in self.engines:
            engine.version = PolicyVersion(self.version)
            await engine.resume()
        self.producer.on_version(self.version)

    async def batches(self, count, train_turns=10):
        out = []
        async with asyncio.timeout(120):
            for _ in range(count):
                groups, stats = await self.producer.next_batch()
                out.append((self.version, groups, stats))
                for _ in range(train_turns):
                    await asyncio.sleep(0)
                await self.publish()
        await self.producer.close()
        return out


def run(count=5, train_turns=10, slow=(1, 3), limits=(3, 5), **options):
    async def go():
        engines = [ScriptedEngine(turns) for turns in slow]
        made = Run(engines, limits, **options)
        return made, await made.batches(count, train_turns)

    return asyncio.run(go())


def check_content(made, batches):
    """Every trajectory says what its seed says, as if it had run in one go; its versions grow."""
    seen = Counter(t.trajectory_id for _, groups, _ in batches for g in groups for t in g.trajectories)
    assert max(seen.values()) == 1
    for _, groups, _ in batches:
        for group in groups:
            for trajectory in group.trajectories:
                seed = request_seed(4, trajectory.trajectory_id)
                length = min(answer_length(seed), MAX_NEW)
                assert trajectory.response_ids == tuple((seed + t) % 1000 for t in range(length))
                assert list(trajectory.response_logprobs) == [-float(v) - 1 for v in trajectory.response_versions]
                assert list(trajectory.response_versions) == sorted(trajectory.response_versions)
                stopped = answer_length(seed) <= MAX_NEW
                assert trajectory.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                assert all(s.finish_reason in (FinishReason.SWITCH, FinishReason.ABORT) for s in trajectory.segments[:-1])
                assert trajectory.reward == score_now(trajectory.prompt, trajectory.response_ids, stopped)
    tokens = made.state.ledger.tokens
    trained = sum(len(t.response_ids) for _, groups, _ in batches for g in groups for t in g.trajectories)
    assert tokens[Fate.TRAINED] + tokens[Fate.MASKED_OVER_AGE] == trained
    assert made.state.ledger.num_sampled == sum(tokens.values())


def ages(batches):
    return [v - by for v, groups, _ in batches for g in groups for t in g.trajectories for by in t.response_versions]


def test_lockstep_trains_what_its_own_version_sampled_whatever_the_engines():
    made, batches = run()
    check_content(made, batches)
    assert set(ages(batches)) == {0}
    assert [[g.group_id for g in groups] for _, groups, _ in batches][1] == [f"step-2/p{i % 7}" for i in range(8, 12)]
    assert all(len(g.trajectories) == 3 for _, groups, _ in batches for g in groups)
    assert made.engines[0].peak == 3 and made.engines[1].peak == 5
    _, alone = run(slow=(2,), limits=(2,))
    assert [groups for _, groups, _ in alone] == [groups for _, groups, _ in batches]
    assert all(0 < stats.efficiency <= 1 and stats.tokens_per_s > 0 for _, _, stats in batches)
    assert made.state.ledger.num_sampled == sum(stats.num_tokens for _, _, stats in batches)


def test_one_step_off_generates_whole_batches_under_the_version_before():
    made, batches = run(kind=ScheduleKind.ONE_STEP_OFF, max_staleness=1)
    check_content(made, batches)
    assert [set(ages([batch])) for batch in batches] == [{0}, {1}, {1}, {1}, {1}]


@pytest.mark.parametrize("pause_mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("over_age", list(OverAge))
def test_asynchronous_changes_weights_under_what_runs_and_keeps_to_the_cap(pause_mode, over_age):
    made, batches = run(
        12, train_turns=4, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=1, over_age=over_age, pause_mode=pause_mode
    )
    check_content(made, batches)
    assert any(len(t.segments) > 1 for _, groups, _ in batches for g in groups for t in g.trajectories)
    if over_age is OverAge.MASK:
        assert made.state.ledger.tokens[Fate.MASKED_OVER_AGE] == sum(age > 1 for age in ages(batches))
    else:
        assert max(ages(batches)) == 1
    if over_age is OverAge.DROP_GROUP:
        assert all(len(g.trajectories) == 3 for _, groups, _ in batches for g in groups)
    assert set(made.engines[0].pauses) == {pause_mode}
    if over_age in (OverAge.DROP_SAMPLE, OverAge.DROP_GROUP):
        assert made.state.ledger.samples[Fate.DROPPED_OVER_AGE] > 0
        assert pause_mode == "abort" or any(engine.cancelled for engine in made.engines)  # aborted: nothing runs there


@pytest.mark.parametrize("pause_mode", ["in_place", "abort"])
def test_lockstep_with_more_groups_under_way_cuts_the_batch_and_resumes_the_rest(pause_mode):
    made, batches = run(6, pause_mode=pause_mode, oversample=2.0, max_staleness=1)
    check_content(made, batches)
    assert all(len(groups) == 4 for _, groups, _ in batches)
    assert max(ages(batches)) == 1
    assert any(len(set(t.response_versions)) > 1 for _, groups, _ in batches for g in groups for t in g.trajectories)
    assert made.drawn <= 4 * 6 + 8  # surplus groups were trained, not drawn anew


def test_a_budget_per_phase_pauses_and_resumes_without_a_loss():
    made, batches = run(6, phase_tokens=4, oversample=2.0, max_staleness=3, pause_mode="abort")
    check_content(made, batches)
    assert max(len(s.token_ids) for _, groups, _ in batches for g in groups for t in g.trajectories for s in t.segments) <= 4


def test_dynamic_sampling_replaces_groups_without_a_signal():
    made, batches = run(6, filter_groups=True, score=score_by_prompt)
    assert all(not groups for _, groups, _ in batches)  # every group is of one kind: the valve
    made, batches = run(6, filter_groups=True)
    check_content(made, batches)
    for _, groups, _ in batches:
        assert len(groups) == 4
        assert all(len({t.reward.is_correct for t in g.trajectories}) == 2 for g in groups)
    tokens = made.state.ledger.tokens
    assert tokens[Fate.FILTERED_SOLVED] > 0 and tokens[Fate.FILTERED_FAILED] > 0
    assert not made.producer._content  # nothing is held for what was filtered


def test_a_batch_is_cut_when_its_time_is_up():
    class Stuck(ScriptedEngine):
        async def generate(self, request):
            if request.request_id.startswith("step-1/p5/"):
                await self.may_end.wait()
            return await super().generate(request)

    async def go():
        engine = Stuck()
        engine.may_end = asyncio.Event()
        made = Run([engine], [20], max_staleness=1, phase_s=0.05)
        async with asyncio.timeout(120):
            first, _ = await made.producer.next_batch()
            engine.may_end.set()
            await made.publish()
            second, _ = await made.producer.next_batch()
        await made.producer.close()
        return first, second

    first, second = asyncio.run(go())
    assert [group.group_id for group in first] == ["step-1/p4", "step-1/p6", "step-1/p0"]
    assert "step-1/p5" in [group.group_id for group in second]


def test_early_stopping_ends_what_is_left_of_a_batch_and_is_counted():
    made, batches = run(30, slow=(1, 1), limits=(12, 12), oversample=2.0, early_stop=True)
    check_content(made, batches)
    assert set(ages(batches)) == {0} and all(len(groups) == 4 for _, groups, _ in batches)
    assert made.state.ledger.samples[Fate.DROPPED_EARLY_STOP] == 30 * 4 * 3
    assert any(engine.cancelled for engine in made.engines) and not made.producer._content
    assert batches[-1][2].length_bias.trained_over_sampled < 0.95 < batches[0][2].length_bias.trained_over_sampled


def test_a_curriculum_spreads_the_samples_and_learns_from_filtered_groups_too():
    curriculum = Curriculum(1)
    for _ in range(9):
        curriculum.observe("p1", 8, 8)
        curriculum.observe("p2", 0, 8)
        curriculum.observe("p3", 4, 8)
    _, batches = run(4, curriculum=curriculum, adapt_samples=True, samples_per_group=4)
    first = {g.prompt.prompt_id: len(g.trajectories) for g in batches[0][1]}
    assert sum(first.values()) == 16 and set(first) == {"p4", "p5", "p6", "p0"} and set(first.values()) == {4}
    second = {g.prompt.prompt_id: len(g.trajectories) for g in batches[1][1]}
    assert sum(second.values()) == 16 and min(second.values()) == 2
    assert second["p3"] >= 5 and max(second["p1"], second["p2"]) <= 3
    filtered = Curriculum(1)
    run(2, curriculum=filtered, filter_groups=True, score=score_by_prompt)
    assert filtered.pass_rate("p0") > 0.7 and filtered.pass_rate("p5") < 0.3


def test_late_prompts_are_answered_in_rounds_of_their_own_and_none_is_lost():
    made, batches = run(40, slow=(1, 1), limits=(9, 9), oversample=2.0, early_stop=True, tail_rounds=True, prompts=1000)
    check_content(made, batches)
    assert set(ages(batches)) == {0} and all(len(groups) == 4 for _, groups, _ in batches)
    rounds = [{group.group_id.split("-")[0] for group in groups} for _, groups, _ in batches]
    assert rounds.count({"tail"}) == made.producer._supply.num_tail_rounds > 3 and {"tail", "step"} not in rounds
    trained = [group.prompt.prompt_id for _, groups, _ in batches for group in groups]
    left = [plan.prompt.prompt_id for plan in made.producer._supply._drawn]
    late = [prompt.prompt_id for prompt in made.producer._supply._late]
    assert len(trained) == 160 and sorted(trained + left + late) == sorted(f"p{number}" for number in range(4, made.drawn + 4))
    lengths = {kind: [] for kind in ("tail", "step")}
    for _, groups, _ in batches:
        for group in groups:
            lengths[group.group_id.split("-")[0]].append(max(len(t.response_ids) for t in group.trajectories))
    assert sum(lengths["step"]) / len(lengths["step"]) < sum(lengths["tail"]) / len(lengths["tail"])


def test_the_first_error_of_an_engine_or_a_reward_is_raised_where_the_batch_is_awaited():
    class Broken(ScriptedEngine):
        async def generate(self, request):
            raise ValueError("engine-1: 5 tokens but 4 log-probs")

    async def broken_score(prompt, ids, ended):
        raise KeyError("answer")

    async def go(engines, **options):
        made = Run(engines, [4] * len(engines), **options)
        try:
            async with asyncio.timeout(120):
                await made.producer.next_batch()
        finally:
            await made.producer.close()
            assert not any(engine.running for engine in engines)

    with pytest.raises(ValueError, match="5 tokens but 4 log-probs"):
        asyncio.run(go([ScriptedEngine(), Broken()]))
    with pytest.raises(KeyError, match="answer"):
        asyncio.run(go([ScriptedEngine()], score=broken_score))


def test_an_engine_whose_context_is_full_ends_the_sample():
    class Short(ScriptedEngine):
        async def generate(self, request):
            return self.to_segments([(request.seed, self.version)] * 5, FinishReason.LENGTH)

    async def go():
        made = Run([Short()], [4])
        return await made.batches(1)

    ((_, groups, _),) = asyncio.run(go())
    assert {len(t.response_ids) for g in groups for t in g.trajectories} == {5}
    assert {t.finish_reason for g in groups for t in g.trajectories} == {FinishReason.LENGTH}


def test_admission_follows_the_kv_cache(monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.producer.LOAD_INTERVAL_S", 0.0)
    engine_count = {}

    async def go(kv_fraction):
        engine = ScriptedEngine(3)
        engine.kv_fraction = kv_fraction
        made = Run([engine], [8], windows=[AdmissionWindow(8)], kind=ScheduleKind.ASYNCHRONOUS, max_staleness=2)
        await made.batches(4)
        engine_count[kv_fraction] = made.state.queue.limits[0]

    asyncio.run(go(0.5))
    asyncio.run(go(0.99))
    assert engine_count[0.5] == 8 and engine_count[0.99] < 4


def test_auto_asks_the_engines_how_full_they_are():
    made, batches = run(3, pause_mode=None, kind=ScheduleKind.ASYNCHRONOUS, max_staleness=2)
    check_content(made, batches)
    assert "in_place" in made.engines[0].pauses  # 1,000 tokens/s of prefill, and no time between updates
