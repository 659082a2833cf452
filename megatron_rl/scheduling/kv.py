"""What becomes of the KV cache of running samples when the weights change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_rl.scheduling.admission import HIGH_WATER
from megatron_rl.types.rollout import EngineLoad

PauseMode = Literal["retract", "in_place", "abort"]
"""As engines know it: `in_place` keeps the KV cache (of the old weights), the others drop it and prefill again."""

CHEAP_SHARE = 0.05
"""A prefill of less than this share of the time between two updates is worth a KV cache of the new weights."""


def choose_pause_mode(loads: Sequence[EngineLoad], held_tokens: int, between_updates_s: float) -> PauseMode:
    """Keep the KV cache or drop it: by how full the caches are and how long they would take to compute again.

    `held_tokens`: prompts and responses of what runs, on all engines. A cache that is nearly full is dropped: what comes
    back in order needs no preemption. Without a measured prefill speed it is dropped too, which is always right.
    """
    if any(load.kv_fraction > HIGH_WATER for load in loads):
        return "retract"
    speeds = [load.num_prefill_tokens / load.prefill_s for load in loads if load.prefill_s > 0]
    if not speeds or held_tokens / sum(speeds) <= CHEAP_SHARE * between_updates_s:
        return "retract"
    return "in_place"
