"""After a sync the embedded engine computes what a fresh load of the exported checkpoint computes."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.model_families.registry import FAMILIES
from tests.distributed.launch import run_distributed
from tests.distributed.sync_walk import walk_sync

pytestmark = pytest.mark.distributed

TWO_RANKS = [{"tp": 2, "etp": 2}, {"ep": 2, "dp": 2}, {"pp": 2, "layers_per_chunk": (3, 1)}]
FOUR_RANKS = [{"tp": 2, "ep": 2, "dp": 2}, {"tp": 2, "etp": 2, "pp": 2, "virtual_pp": 2}]


@pytest.mark.parametrize(
    ("family", "world_size", "layouts", "engine_tp"),
    [
        ("qwen3_moe", 2, TWO_RANKS, 2),
        ("qwen3_moe", 4, FOUR_RANKS, 1),
        ("llama", 2, [{"tp": 2}, {"pp": 2}], 2),
    ],
)
def test_the_engine_equals_a_fresh_load(family, world_size, layouts, engine_tp):
    gaps = run_distributed(
        walk_sync,
        world_size,
        timeout_s=240,
        dims=dataclasses.asdict(FAMILIES[family].debug_dims),
        family=family,
        layouts=layouts,
        engine={"kind": "embedded", "tp": engine_tp},
        key_hex="ab" * 32,
    )[0]
    assert len(gaps) == len(layouts)
    assert max(gaps.values()) < 1e-4, gaps
