"""From sections to the scheduler's settings."""

from __future__ import annotations

from megatron_rl.config.resolve import resolve
from megatron_rl.config.rollout_sections import DynamicSamplingSection, PartialSection, SamplingSection, SglangSection
from megatron_rl.config.sections import (
    ExperimentConfig,
    RolloutSection,
    RunSection,
    SyncSection,
)
from megatron_rl.controller.schedule import build_producer, plan_schedule
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings
from megatron_rl.types.rollout import SamplingParams


def test_every_key_reaches_the_scheduler():
    run = RunSection(prompts_per_step=5, samples_per_prompt=3)
    rollout = RolloutSection(
        schedule="one_step_off",
        over_age="mask",
        oversample=1.5,
        sampling=SamplingSection(max_new_tokens=77),
        partial=PartialSection(phase_tokens=9, max_versions=4),
        dynamic_sampling=DynamicSamplingSection(enabled=True, max_oversample_factor=2.5),
    )
    resolved = resolve(ExperimentConfig(run=run, rollout=rollout))
    assert plan_schedule(resolved.run, resolved.rollout) == ScheduleSettings(
        groups_per_batch=5,
        samples_per_group=3,
        max_new_tokens=77,
        kind=ScheduleKind.ONE_STEP_OFF,
        max_staleness=2,
        over_age=OverAge.MASK,
        oversample=1.5,
        phase_tokens=9,
        max_versions=4,
        filter_groups=True,
        max_oversample_factor=2.5,
    )
    stopped = resolve(ExperimentConfig(rollout=RolloutSection(leftover="drop", oversample=3.0)))
    settings = plan_schedule(stopped.run, stopped.rollout)
    assert settings.early_stop and settings.oversample == 3.0 and settings.max_staleness == 0


def test_only_a_shared_cache_moves_the_limits():
    for engine, follows, expected in (("embedded", True, 0), ("sglang", False, 0), ("sglang", True, 2)):
        sglang = SglangSection(follows_kv_use=follows)
        config = resolve(ExperimentConfig(rollout=RolloutSection(engine=engine, sglang=sglang)))
        producer = build_producer(
            config.run, config.rollout, SyncSection(pause_mode="abort"), [object(), object()], [4, 6],
            lambda *_: None, SamplingParams(8), lambda count: [],
        )  # fmt: skip
        assert len(producer._windows) == expected and producer.pause_mode == "abort"
