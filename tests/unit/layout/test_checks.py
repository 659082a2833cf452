"""Layouts that do not divide a model are refused by key."""

from __future__ import annotations

import pytest

from megatron_rl.layout.checks import check_context, check_engine_layout, check_router_replay, check_trainer_layout
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


def test_the_key_is_that_of_the_section():
    (problem,) = check_trainer_layout(MOE, ParallelLayout(tp=3), "critic.layout")[:1]
    assert problem[0] == "critic.layout.tp"


def test_layouts_that_fit_pass():
    assert check_trainer_layout(MOE, ParallelLayout(tp=2, pp=2, virtual_pp=2, ep=4, etp=2, dp=4)) == []
    assert check_engine_layout(MOE, EngineLayout(4), "rollout.embedded") == []
    assert check_engine_layout(MOE, EngineLayout(8, ep=4, attention_dp=2), "rollout.sglang") == []
    (problem,) = check_engine_layout(DENSE, EngineLayout(3), "k")[:1]
    assert problem[0] == "k.tp_size" and "possible: 1, 2, 4" in problem[1]


@pytest.mark.parametrize(
    ("dims", "layout", "key", "reason"),
    [
        (MOE, EngineLayout(8, ep=3), "rollout.sglang.ep_size", "3 does not divide the engine's ranks (8)"),
        (MOE, EngineLayout(8, attention_dp=3), "rollout.sglang.attn_dp_size", "does not divide the engine's ranks"),
        (MOE, EngineLayout(16, ep=16, attention_dp=4), "rollout.sglang.ep_size", "16 does not divide the experts (8)"),
        (MOE, EngineLayout(16, ep=2, attention_dp=4), "rollout.sglang.ep_size", "8 does not divide moe_intermediate_size (36)"),
        (MOE, EngineLayout(16, ep=8, attention_dp=2), "rollout.sglang.attn_dp_size", "8 does not divide the query heads (4)"),
        (DENSE, EngineLayout(2, ep=2), "rollout.sglang.ep_size", "no experts"),
    ],
)
def test_engine_layouts_that_do_not_divide_the_model_are_named(dims, layout, key, reason):
    problems = check_engine_layout(dims, layout, "rollout.sglang")
    assert any(path == key and reason in text for path, text in problems), problems


@pytest.mark.parametrize(
    ("split", "reason"), [((2, 2, 1), "expected one entry per chunk"), ((2, 3), "add up to the 4 layers"), ((5, -1), "add up")]
)
def test_uneven_pipelines_must_add_up(split, reason):
    ((key, text),) = check_trainer_layout(MOE, ParallelLayout(pp=2, layers_per_chunk=split))
    assert key == "trainer.layout.layers_per_chunk" and reason in text
    assert check_trainer_layout(MOE, ParallelLayout(pp=3, layers_per_chunk=(2, 1, 1))) == []


def test_a_prompt_and_its_answer_must_fit_into_the_positions():
    assert check_context(256, 56, 200, "rollout.sampling") == []
    ((key, reason),) = check_context(256, 56, 201, "rollout.sampling")
    assert key == "rollout.sampling.max_new_tokens"
    assert reason.startswith("expected at most 200 (the model has 256 positions, prompts take up to data.max_prompt_tokens=56")
    assert "at most 0 (" in check_context(64, 80, 8, "rollout.eval_sampling")[0][1]
