"""The replayed choice inside Megatron's own routing function, and which rows of a rank get which token's experts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_rl.algorithms.routing_replay import expert_probabilities, select_experts
from megatron_rl.platforms.platform import select_platform
from megatron_rl.trainer.router_replay import ReplayedChoice, RouterRows, install_router_replay
from megatron_rl.types.routing import RoutingShape, unknown_expert

NUM_TOKENS, NUM_EXPERTS, TOPK = 7, 6, 2
ROUTERS = {
    "softmax_post": {"score_function": "softmax"},
    "softmax_pre": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.3, 0.3, NUM_EXPERTS), "scaling_factor": 1.5},
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    select_platform().prepare_megatron()


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and experts of which no token would have chosen all."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    return logits, torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOPK] for _ in range(NUM_TOKENS)])


@pytest.mark.parametrize("kind", ROUTERS)
def test_replayed_probabilities_and_gradients_are_those_of_the_pure_function(kind: str) -> None:
    logits, experts = draw(1)
    choice, factors = ReplayedChoice(), torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    choice.experts_NK = experts
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    probabilities, visited = topk_routing_with_score_function(mine, TOPK, router_replay=choice, **ROUTERS[kind])
    scaling = ROUTERS[kind].get("scaling_factor", 1.0)
    expected = expert_probabilities(theirs, experts, kind, scaling)
    torch.testing.assert_close(probabilities, expected)
    assert torch.equal(visited, torch.zeros_like(visited).scatter(1, experts, True))
    (probabilities * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert mine.grad is not None and (mine.grad != 0).any()


@pytest.mark.parametrize("kind", ROUTERS)
def test_its_own_choice_replayed_is_bit_equal_and_unknown_tokens_choose_freely(kind: str) -> None:
    logits, experts = draw(3)
    free, choice = ReplayedChoice(), ReplayedChoice()
    natural = topk_routing_with_score_function(logits, TOPK, router_replay=free, **ROUTERS[kind])
    assert torch.equal(natural[0], topk_routing_with_score_function(logits, TOPK, **ROUTERS[kind])[0])
    choice.experts_NK = free.chosen_NK
    again = topk_routing_with_score_function(logits, TOPK, router_replay=choice, **ROUTERS[kind])
    assert torch.equal(again[0], natural[0]) and torch.equal(again[1], natural[1])
    is_known = torch.arange(NUM_TOKENS) % 3 > 0
    choice.experts_NK = torch.where(is_known[:, None], experts, -1)
    mixed, _ = topk_routing_with_score_function(logits, TOPK, router_replay=choice, **ROUTERS[kind])
    assert torch.equal(mixed[~is_known], natural[0][~is_known])
    assert not torch.equal(mixed[is_known], natural[0][is_known])
    bias = ROUTERS[kind].get("expert_bias")
    assert torch.equal(free.chosen_NK.sort(1).values, select_experts(logits, TOPK, kind, bias).sort(1).values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 11), max_size=20), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_each_row_gets_its_first_token_and_each_token_comes_back(rows: list[int], num_ranks: int, seed: int) -> None:
    """12 rows over the ranks; several tokens may share a row, some rows have none."""
    shape = RoutingShape(num_layers=3, top_k=TOPK, num_experts=NUM_EXPERTS)
    row_of_T = np.array(rows, dtype=np.int64)
    by_row = np.random.default_rng(seed).integers(0, NUM_EXPERTS, (12, 3, TOPK)).astype(shape.dtype)
    experts_TYK = by_row[row_of_T].copy()
    for later in [t for t, row in enumerate(rows) if row in rows[:t]]:
        experts_TYK[later] = (experts_TYK[later] + 1) % NUM_EXPERTS
        if seed == 0 and rows[:later].count(rows[later]) == 1:  # here the second token of a row is the first with experts
            experts_TYK[rows.index(rows[later])] = unknown_expert(shape.dtype)
            experts_TYK[later] = by_row[rows[later]]
    back = shape.empty(len(rows))
    for rank in range(num_ranks):
        part = RouterRows(row_of_T, rank * 12 // num_ranks, 12 // num_ranks)
        by_layer = part.by_layer(experts_TYK, torch.device("cpu"))
        assert sorted(by_layer) == [1, 2, 3]
        for layer, experts_NK in by_layer.items():
            for place, row in enumerate(range(part.first, part.first + part.num_rows)):
                expected = by_row[row, layer - 1].tolist() if row in rows else [-1, -1]
                assert experts_NK[place].tolist() == expected
        mine = part.of_tokens({layer: experts for layer, experts in by_layer.items() if layer != 2}, shape)
        known = (mine != unknown_expert(shape.dtype)).all(axis=2)
        assert not known[:, 1].any()
        back[known] = mine[known]
    np.testing.assert_array_equal(back[:, [0, 2]], by_row[row_of_T][:, [0, 2]])


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"num_moe_experts": None}, "no experts; set it to off"),
        ({"moe_router_fusion": True}, "moe_router_fusion; set that to false"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, r"recompute_modules \['moe'\]"),
    ],
)
def test_what_runs_past_the_replay_is_refused(settings_: dict[str, object], reason: str) -> None:
    fine = {"num_moe_experts": 4, "moe_router_fusion": False, "recompute_granularity": None, "recompute_modules": None}
    with pytest.raises(ValueError, match=rf"algorithm\.router_replay: .*{reason}"):
        install_router_replay([], SimpleNamespace(**{**fine, **settings_}))


def test_the_process_wide_list_of_megatron_stays_as_it_is() -> None:
    before = list(RouterReplay.global_router_replay_instances)
    ReplayedChoice()
    assert RouterReplay.global_router_replay_instances == before
