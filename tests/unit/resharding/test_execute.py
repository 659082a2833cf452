"""Slices sent by simulated trainer ranks over the real channel into real receivers equal direct slices of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.resharding.verify import SyncError, check_receiver
from megatron_rl.types.layout import EngineLayout, ParallelLayout
from tests.unit.resharding.rig import world

LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2),
    ParallelLayout(pp=2, virtual_pp=2),
    ParallelLayout(tp=2, pp=2, ep=2, dp=2),
    ParallelLayout(tp=2, etp=2, dp=2),
    ParallelLayout(dp=3),
]


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("engine", [EngineLayout(1, 1), EngineLayout(2, 2), EngineLayout(4, 1, 16)], ids=str)
def test_synced_shards_equal_direct_slices(family_name, layout, engine):
    if not FAMILIES[family_name].debug_dims.num_experts:
        layout = ParallelLayout(tp=layout.tp, pp=layout.pp, virtual_pp=layout.virtual_pp, dp=layout.dp)
    dtype = torch.bfloat16 if engine.num_engines == 2 else torch.float32
    with world(family_name, layout, engine, dtype) as one:
        one.sync()
        one.assert_whole()


def test_connections_are_kept_and_follow_new_weights():
    with world("qwen3_moe", ParallelLayout(tp=2, pp=2), EngineLayout(2, 1), torch.float32) as one:
        one.sync()
        channels = [pair._channel for sender in one.senders for pair in sender._pairs]
        for seed in (12, 13):
            one.load(seed)
            one.sync()
            one.assert_whole()
        assert [pair._channel for sender in one.senders for pair in sender._pairs] == channels
        for chunk in (chunk for chunks in one.chunks for chunk in chunks):  # parameters that moved are found again
            for name in chunk:
                chunk[name] = chunk[name].clone()
        one.load(14)
        one.sync()
        one.assert_whole()


def test_a_connection_that_went_idle_too_long_is_opened_anew():
    with world("llama", ParallelLayout(), EngineLayout(2, 1), torch.float32) as one:
        one.sync()
        for receiver in one.receivers:
            for connection in list(receiver._connections):
                connection.shutdown(2)
        one.load(3)
        one.sync()
        one.assert_whole()


def test_received_elements_are_the_shard_and_no_more():
    family = FAMILIES["qwen3_moe"]
    dims = family.debug_dims
    plan = build_reshard_plan("qwen3_moe", dims, ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, 1))
    per_rank = plan.num_elements_between().sum(axis=0)
    padding = [sum(part - live for _ in range(2)) * dims.hidden_size for part, live in ((64, 64), (64, 37))]
    for rank in range(2):
        shard = sum(int(np.prod(shape)) for shape in plan.target_shapes.values())
        assert per_rank[rank] == shard - padding[rank]


def test_models_that_differ_are_named():
    plan = build_reshard_plan("llama", FAMILIES["llama"].debug_dims, ParallelLayout(), EngineLayout(1, 1))
    described = {name: (shape, "float32") for name, shape in plan.target_shapes.items()}
    assert check_receiver(plan, 0, described) == dict.fromkeys(plan.target_shapes, "float32")
    missing = dict(list(described.items())[1:])
    with pytest.raises(SyncError, match=r"embed_tokens"):
        check_receiver(plan, 0, missing)
    with pytest.raises(SyncError, match=r"lm_head"):
        check_receiver(plan, 0, described | {"lm_head.weight": ((128, 48), "float32")})
    with pytest.raises(SyncError, match=r"shape \(48, 9\)"):
        check_receiver(plan, 0, described | {"model.norm.weight": ((48, 9), "float32")})
