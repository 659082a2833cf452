"""The producer on scripted engines: what comes out is what they sampled, in whole groups, by every schedule."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.scheduling.settings import OverAge, ScheduleKind
from megatron_rl.scheduling.work import Fate
from megatron_rl.types.rollout import FinishReason
from tests.unit.rollout.scripted_producer import Run, ScriptedEngine, ages, check_content, run, score_by_prompt


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
        assert pause_mode == "abort" or any(engine.aborted for engine in made.engines)  # aborted: nothing runs there


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
    assert any(engine.aborted for engine in made.engines) and not made.producer._content
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
