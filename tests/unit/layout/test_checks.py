"""Layouts that do not divide a model are refused by key."""

from __future__ import annotations

import pytest

from megatron_rl.layout.checks import check_engine_layout, check_router_replay, check_trainer_layout
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.types.layout import EngineLayout, ParallelLayout

MOE, DENSE = FAMILIES["qwen3_moe"].debug_dims, FAMILIES["llama"].debug_dims


@pytest.mark.parametrize(
    ("dims", "layout", "key", "reason"),
    [
        (MOE, ParallelLayout(tp=3), "trainer.layout.tp", "query heads"),
        (MOE, ParallelLayout(tp=4), "trainer.layout.tp", "key-value heads"),
        (MOE, ParallelLayout(pp=3), "trainer.layout.pp", "layers"),
        (MOE, ParallelLayout(pp=2, virtual_pp=4), "trainer.layout.virtual_pp", "layers"),
        (MOE, ParallelLayout(virtual_pp=2), "trainer.layout.virtual_pp", "needs pp"),
        (MOE, ParallelLayout(ep=3, dp=3), "trainer.layout.ep", "experts"),
        (MOE, ParallelLayout(etp=5, dp=5), "trainer.layout.etp", "moe_intermediate_size"),
        (DENSE, ParallelLayout(ep=2, dp=2), "trainer.layout.ep", "no experts"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_named(dims, layout, key, reason):
    problems = check_trainer_layout(dims, layout)
    assert any(path == key and reason in text for path, text in problems), problems


def test_replay_needs_a_router():
    assert check_router_replay(DENSE, "r3")[0][0] == "algorithm.router_replay"
    assert check_router_replay(DENSE, "off") == check_router_replay(MOE, "r2") == []


def test_layouts_that_fit_pass():
    assert check_trainer_layout(MOE, ParallelLayout(tp=2, pp=2, virtual_pp=2, ep=4, etp=2, dp=4)) == []
    assert check_engine_layout(MOE, EngineLayout(4), "rollout.embedded") == []
    assert check_engine_layout(MOE, EngineLayout(8, ep=4, attention_dp=2), "rollout.sglang") == []
    (problem,) = check_engine_layout(DENSE, EngineLayout(3), "k")[:1]
    assert problem[0] == "k.tp_size" and "possible: 1, 2, 4" in problem[1]
