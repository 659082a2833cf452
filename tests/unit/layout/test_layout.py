"""Rank arithmetic, pipeline places, boxes and the checks that need model sizes."""

from __future__ import annotations

import random

import pytest

from megatron_rl.layout.checks import check_engine_layout, check_trainer_layout
from megatron_rl.layout.coords import coords_of, dense_replicas, expert_rank_of, expert_replicas, rank_of
from megatron_rl.layout.intervals import intersect, matrix_shape, round_up, shard_range
from megatron_rl.layout.pipeline import layers_of_chunk, place_of_layer
from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.types.layout import ParallelLayout, ShardInterval


def random_layout(rng: random.Random) -> ParallelLayout:
    tp, cp, dp, pp = (rng.choice([1, 2, 3]) for _ in range(4))
    dense = tp * cp * dp
    divisors = [d for d in range(1, dense + 1) if dense % d == 0]
    etp = rng.choice([d for d in divisors if d <= tp])
    ep = rng.choice([d for d in divisors if dense % (d * etp) == 0])
    return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, virtual_pp=rng.choice([1, 2]) if pp > 1 else 1)


def test_coordinates_and_ranks_are_inverse():
    rng = random.Random(1)
    for _ in range(200):
        layout = random_layout(rng)
        for rank in range(layout.world_size):
            c = coords_of(layout, rank)
            assert rank_of(layout, tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == rank
            assert expert_rank_of(layout, etp=c.etp, ep=c.ep, expert_dp=c.expert_dp, pp=c.pp) == rank
            assert rank in dense_replicas(layout, tp=c.tp, pp=c.pp)
            assert rank in expert_replicas(layout, etp=c.etp, ep=c.ep, pp=c.pp)
    with pytest.raises(ValueError, match="outside"):
        coords_of(ParallelLayout(tp=2), 2)


def test_replicas_partition_the_ranks():
    rng = random.Random(2)
    for _ in range(100):
        layout = random_layout(rng)
        dense = [r for pp in range(layout.pp) for tp in range(layout.tp) for r in dense_replicas(layout, tp=tp, pp=pp)]
        expert = [
            r for pp in range(layout.pp) for ep in range(layout.ep) for etp in range(layout.etp)
            for r in expert_replicas(layout, etp=etp, ep=ep, pp=pp)
        ]  # fmt: skip
        assert sorted(dense) == sorted(expert) == list(range(layout.world_size))


def test_tp_is_fastest_and_pp_slowest():
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert [coords_of(layout, rank).tp for rank in range(4)] == [0, 1, 0, 1]
    assert [coords_of(layout, rank).ep for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert coords_of(layout, 13).pp == 1


@pytest.mark.parametrize(("pp", "virtual_pp", "layers"), [(1, 1, 5), (2, 1, 6), (2, 2, 8), (3, 2, 12), (4, 1, 4)])
def test_layers_have_one_place_each(pp, virtual_pp, layers):
    layout = ParallelLayout(pp=pp, virtual_pp=virtual_pp)
    for layer in range(layers):
        place = place_of_layer(layout, layers, layer)
        assert layers_of_chunk(layout, layers, place.pp, place.chunk)[place.local_layer] == layer
    every = [l for p in range(pp) for c in range(virtual_pp) for l in layers_of_chunk(layout, layers, p, c)]
    assert sorted(every) == list(range(layers))
    with pytest.raises(ValueError, match="do not divide"):
        place_of_layer(ParallelLayout(pp=2), 5, 0)


def test_intersections_agree_with_sets():
    rng = random.Random(3)

    def box() -> ShardInterval:
        return ShardInterval(*(rng.randrange(6) for _ in range(4)), rng.randrange(1, 5), rng.randrange(1, 5))

    def cells(b: ShardInterval) -> dict:
        return {
            (b.global_row + r, b.global_col + c): (b.local_row + r, b.local_col + c)
            for r in range(b.num_rows) for c in range(b.num_cols)
        }  # fmt: skip

    for _ in range(500):
        a, b = box(), box()
        common = cells(a).keys() & cells(b).keys()
        shared = intersect(a, b)
        if not common:
            assert shared is None
            continue
        for whole, part in zip((a, b), shared, strict=True):
            assert {cell: cells(whole)[cell] for cell in common} == cells(part)


def test_small_arithmetic():
    assert [shard_range(12, 3, r) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]
    with pytest.raises(ValueError, match="does not divide"):
        shard_range(10, 3, 0)
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [matrix_shape(s) for s in ((7,), (3, 5), (2, 3, 5))] == [(7, 1), (3, 5), (6, 5)]


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


def test_layouts_that_fit_pass():
    assert check_trainer_layout(MOE, ParallelLayout(tp=2, pp=2, virtual_pp=2, ep=4, etp=2, dp=4)) == []
    assert check_engine_layout(MOE, 4, "rollout.embedded.tp_size") == []
    (problem,) = check_engine_layout(DENSE, 3, "k")[:1]
    assert problem[0] == "k" and "possible: 1, 2, 4" in problem[1]
