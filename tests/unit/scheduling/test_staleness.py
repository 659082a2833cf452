"""Admission and batches against a brute-force search for a schedule in which nothing is late."""

from __future__ import annotations

import random

from megatron_rl.scheduling.settings import ScheduleKind, ScheduleSettings
from megatron_rl.scheduling.staleness import num_admissible, num_required, plan_batch


def settings(kind=ScheduleKind.ASYNCHRONOUS, batch=3, cap=2, **options) -> ScheduleSettings:
    return ScheduleSettings(batch, 2, 8, kind=kind, max_staleness=cap, **options)


def can_meet_all(starts: list[int], version: int, batch: int, cap: int) -> bool:
    """Whether batches of `version`, version + 1, ... can take all groups before their deadlines."""
    left = sorted(starts)
    while left:
        if left[0] + cap < version:
            return False
        left = left[batch:]
        version += 1
    return True


def test_a_planned_batch_leaves_a_feasible_rest_and_one_that_waits_does_not():
    num_waits = 0
    for seed in range(3000):
        rng = random.Random(seed)
        batch, cap, version = rng.randint(1, 3), rng.randint(0, 3), 5
        starts = [rng.randint(version - cap, version) for _ in range(rng.randint(batch, batch * (cap + 1)))]
        if not can_meet_all(starts, version, batch, cap):
            continue
        is_ready = [rng.random() < 0.6 for _ in starts]
        unstarted = rng.randint(0, max(0, batch * (cap + 1) - len(starts)))
        ready: dict[int, int] = {}
        for start, done in zip(starts, is_ready, strict=True):
            if done:
                ready[start] = ready.get(start, 0) + 1
        if sum(ready.values()) < batch:
            continue
        started = {start: starts.count(start) for start in set(starts)}
        plan = plan_batch(ready, batch, num_required(settings(batch=batch, cap=cap), version, started, unstarted))
        rest = starts + [version] * unstarted
        oldest_first = sorted(start for start, done in zip(starts, is_ready, strict=True) if done)[:batch]
        for start in oldest_first:
            rest.remove(start)
        fits = can_meet_all(rest, version + 1, batch, cap)
        assert (plan is not None) == fits, (seed, starts, is_ready)
        if plan is None:
            num_waits += 1
        else:
            assert sum(plan.values()) == batch
            assert sorted(s for s, count in plan.items() for _ in range(count)) == oldest_first
    assert num_waits > 50


def test_admission_never_exceeds_what_the_batches_can_take():
    for version, next_trained, outstanding, expected in ((4, 4, 0, 9), (4, 5, 0, 6), (4, 5, 6, 0), (4, 5, 7, 0), (5, 5, 6, 3)):
        assert num_admissible(settings(), version, next_trained, outstanding) == expected
    lockstep = settings(ScheduleKind.LOCKSTEP, oversample=1.5)
    assert num_admissible(lockstep, 4, 4, 1) == 4
    assert num_admissible(lockstep, 4, 5, 1) == 0
    assert num_admissible(settings(ScheduleKind.ONE_STEP_OFF), 4, 5, 1) == 2
