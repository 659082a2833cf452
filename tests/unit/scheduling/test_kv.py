"""Keeping or dropping the KV cache."""

from __future__ import annotations

from megatron_rl.scheduling.kv import choose_pause_mode
from megatron_rl.types.rollout import EngineLoad


def load(kv_fraction=0.5, prefill_tokens=20_000, prefill_s=1.0) -> EngineLoad:
    return EngineLoad(3, 0, kv_fraction, 0, prefill_tokens, prefill_s)


def test_a_cache_is_kept_where_its_prefill_would_cost_time():
    loads = [load(), load(prefill_tokens=60_000, prefill_s=2.0)]  # 20k and 30k tokens/s
    assert choose_pause_mode(loads, 100_000, 60.0) == "retract"  # 2 s of 60
    assert choose_pause_mode(loads, 1_000_000, 60.0) == "in_place"  # 20 s of 60


def test_a_full_cache_or_an_unknown_speed_is_dropped():
    assert choose_pause_mode([load(), load(kv_fraction=0.96)], 1_000_000, 60.0) == "retract"
    assert choose_pause_mode([load(prefill_tokens=0, prefill_s=0.0)], 1_000_000, 60.0) == "retract"
    assert choose_pause_mode([], 0, 0.0) == "retract"
