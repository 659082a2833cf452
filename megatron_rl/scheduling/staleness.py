"""How many groups may be under way, and which may go into a batch, so that nothing is trained too old. Pure.

Version v is trained by one batch, before v + 1 exists. A group that started under version s may be trained by the batches
of versions s .. s + max_staleness: its deadline is s + max_staleness. A batch takes B groups, so that the schedule is
feasible as long as, for each deadline d, no more groups are due by d than the batches up to d can take (the test of
earliest-deadline-first; Liu and Layland, 1973). Admission keeps it for new groups, `plan_batch` for those that are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_rl.scheduling.settings import ScheduleKind, ScheduleSettings


def num_admissible(settings: ScheduleSettings, version: int, next_trained: int, num_outstanding: int) -> int:
    """Groups that may be released now: `num_outstanding` are released and not in a batch yet, and the engines hold
    `version`. `next_trained` is the version that the next batch trains: `version`, or the one after it when the batch of
    `version` was taken already.

    Asynchronous: what the batches next_trained .. version + max_staleness can take. It rises by B right after a sync and
    never by taking a batch, so that starts come bunched under the newest weights, and the window closes by count.
    """
    if settings.kind is ScheduleKind.ASYNCHRONOUS:
        num_batches = version + settings.max_staleness - next_trained + 1
        return max(0, settings.groups_per_batch * num_batches - num_outstanding)
    if settings.kind is ScheduleKind.LOCKSTEP and next_trained > version:
        return 0  # the next batch starts under the next weights
    return max(0, math.ceil(settings.oversample * settings.groups_per_batch) - num_outstanding)


def num_required(
    settings: ScheduleSettings, version: int, started: Mapping[int, int], num_unstarted: int
) -> list[tuple[int, int]]:
    """(start, how many groups that started no later the batch of `version` must take at least), starts ascending.

    `started[v]`: outstanding groups that started under version v. Those that have not started are due last: they start
    under `version` at the earliest.
    """
    required = []
    num_due = 0
    for start in sorted(started.keys() | {version}):
        num_due += started.get(start, 0) + (num_unstarted if start == version else 0)
        num_later_batches = start + settings.max_staleness - version
        required.append((start, num_due - settings.groups_per_batch * num_later_batches))
    return required


def plan_batch(ready: Mapping[int, int], num_groups: int, required: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    """How many groups to take of each start, the oldest first; None when that is less than `required`, so that the batch
    must wait for older groups. `ready[v]`: complete groups that started under version v."""
    plan: dict[int, int] = {}
    num_left = num_groups
    for start in sorted(ready):
        plan[start] = min(ready[start], num_left)
        num_left -= plan[start]
    for start, count in required:
        if sum(taken for version, taken in plan.items() if version <= start) < count:
            return None
    return plan
