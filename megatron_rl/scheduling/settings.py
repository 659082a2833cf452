"""What a rollout scheduler is told: sizes, schedule and policies. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScheduleKind(StrEnum):
    """When generation runs beside training.

    `lockstep`: only between two training steps. `one_step_off`: the next batch is generated while this one trains, whole
    under one version. `asynchronous`: always; weights change under running samples, and `max_staleness` bounds admission.
    """

    LOCKSTEP = "lockstep"
    ONE_STEP_OFF = "one_step_off"
    ASYNCHRONOUS = "asynchronous"


class OverAge(StrEnum):
    """What becomes of tokens that would be trained more than `max_staleness` versions after they were sampled.

    `wait`: it does not happen; a batch waits for the old groups. `mask`: these tokens get no loss. `drop_sample`: the
    sample is dropped, its siblings train. `drop_group`: all of it is dropped.
    """

    WAIT = "wait"
    MASK = "mask"
    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """`max_new_tokens` is the global cap on a response; `phase_tokens` what one sample may get per phase (None: all).

    `oversample`: groups under way over the groups of a batch (lockstep and one_step_off; asynchronous takes what
    `max_staleness` allows). `filter_groups`: groups of one correctness (all solved, all failed) are left out and replaced,
    until (`max_oversample_factor` - 1) batches of them were filtered for one batch, which is then cut short.
    `max_versions`: a sample sampled by more versions than this is dropped (None: no limit). `early_stop`: what is left when a
    lockstep batch is cut is dropped, not kept for the next one (a policy to compare with: it prefers short answers).
    `adapt_samples`: the samples of a draw are spread over its prompts by the curriculum; `samples_per_group` is their mean.
    """

    groups_per_batch: int
    samples_per_group: int
    max_new_tokens: int
    kind: ScheduleKind = ScheduleKind.LOCKSTEP
    max_staleness: int = 0
    over_age: OverAge = OverAge.WAIT
    oversample: float = 1.0
    phase_tokens: int | None = None
    max_versions: int | None = None
    filter_groups: bool = False
    max_oversample_factor: float = 4.0
    early_stop: bool = False
    adapt_samples: bool = False

    def __post_init__(self) -> None:
        if min(self.groups_per_batch, self.samples_per_group, self.max_new_tokens) < 1 or self.max_staleness < 0:
            raise ValueError(f"groups, samples and tokens must be at least 1 and staleness at least 0: {self}")
        if self.kind is ScheduleKind.ONE_STEP_OFF and self.max_staleness < 1:
            raise ValueError("one_step_off trains every sample one version later: max_staleness must be at least 1")
        num_batches = max_oversample(self.kind, self.max_staleness)
        if self.early_stop and self.kind is not ScheduleKind.LOCKSTEP:
            raise ValueError(f"early_stop cuts the batches of lockstep, not of {self.kind.value}")
        if self.oversample < 1 or (self.oversample > num_batches and not self.early_stop):
            raise ValueError(
                f"oversample {self.oversample:g}: expected at least 1 and at most {num_batches} with max_staleness "
                f"{self.max_staleness}, or what is left over grows too old to train on"
            )
        if self.phase_tokens is not None and self.phase_tokens < 1:
            raise ValueError(f"phase_tokens {self.phase_tokens}: expected at least 1")
        if self.max_oversample_factor < 1:
            raise ValueError(f"max_oversample_factor {self.max_oversample_factor:g}: expected at least 1")


def max_oversample(kind: ScheduleKind, max_staleness: int) -> int:
    """The batches that can still take a group when it is released."""
    return max_staleness if kind is ScheduleKind.ONE_STEP_OFF else max_staleness + 1
