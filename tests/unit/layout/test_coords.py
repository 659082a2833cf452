"""Rank arithmetic."""

from __future__ import annotations

import random

import pytest

from megatron_rl.layout.coords import (
    coords_of,
    dense_replicas,
    engine_attention_rank,
    engine_expert_coords,
    expert_rank_of,
    expert_replicas,
    rank_of,
)
from megatron_rl.types.layout import EngineLayout, ParallelLayout


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


def test_ranks_inside_an_engine():
    """Eight ranks: experts over four groups of two; attention twice, each over four."""
    layout = EngineLayout(tp=8, ep=4, attention_dp=2)
    assert [engine_expert_coords(layout, rank) for rank in (0, 1, 2, 7)] == [(0, 0), (0, 1), (1, 0), (3, 1)]
    assert [engine_attention_rank(layout, rank) for rank in (0, 3, 4, 7)] == [0, 3, 0, 3]
