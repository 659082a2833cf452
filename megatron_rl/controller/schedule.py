"""The producer of a run, from its sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config.sections import RolloutSection, RunSection, SyncSection
from megatron_rl.rollout.collector import Scorer
from megatron_rl.rollout.generate.function import GenerateFunction
from megatron_rl.rollout.producer import Producer, ReportingEngine
from megatron_rl.rollout.prompt_supply import Draw
from megatron_rl.scheduling.admission import AdmissionWindow
from megatron_rl.scheduling.curriculum import Curriculum
from megatron_rl.scheduling.rollout_state import RolloutState
from megatron_rl.scheduling.settings import OverAge, ScheduleKind, ScheduleSettings
from megatron_rl.types.rollout import SamplingParams


def build_producer(
    run: RunSection,
    rollout: RolloutSection,
    sync: SyncSection,
    engines: Sequence[ReportingEngine],
    capacities: Sequence[int],
    score: Scorer,
    sampling: SamplingParams,
    draw: Draw,
    function: GenerateFunction | None = None,
    curriculum: Curriculum | None = None,
    adapt_samples: bool = False,
) -> Producer:
    """`capacities[e]`: the most requests that engine e runs at once."""
    settings = replace(plan_schedule(run, rollout), adapt_samples=adapt_samples)
    follows_kv = rollout.engine == "sglang" and rollout.sglang.follows_kv_use
    return Producer(
        engines,
        RolloutState(settings, capacities, curriculum=curriculum),
        score,
        sampling,
        draw,
        run.seed,
        pause_mode=sync.pause_mode,
        windows=[AdmissionWindow(capacity) for capacity in capacities] if follows_kv else (),
        function=function,
        phase_s=rollout.partial.phase_s,
        tail_rounds=rollout.leftover == "tail_rounds",
    )


def plan_schedule(run: RunSection, rollout: RolloutSection) -> ScheduleSettings:
    """The scheduler's settings of a resolved experiment."""
    assert rollout.max_staleness is not None, "resolve the configuration first"
    return ScheduleSettings(
        groups_per_batch=run.prompts_per_step,
        samples_per_group=run.samples_per_prompt,
        max_new_tokens=rollout.sampling.max_new_tokens,
        kind=ScheduleKind(rollout.schedule),
        max_staleness=rollout.max_staleness,
        over_age=OverAge(rollout.over_age),
        oversample=rollout.oversample,
        phase_tokens=rollout.partial.phase_tokens,
        max_versions=rollout.partial.max_versions,
        filter_groups=rollout.dynamic_sampling.enabled,
        max_oversample_factor=rollout.dynamic_sampling.max_oversample_factor,
        early_stop=rollout.leftover != "resume",
    )
