"""Sending is as even as ownership allows: against all subsets of classes, and against the coordinates of every rank."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from megatron_rl.layout.coords import dense_replicas, expert_replicas
from megatron_rl.resharding.sources import SourceClasses, balance, stage_quotas
from megatron_rl.types.layout import ParallelLayout


def forced_by_ownership(loads, groups_of, sizes):
    """The largest load of a set of classes over the members that can send it, over every set."""
    most = 0.0
    for count in range(1, len(loads) + 1):
        for chosen in combinations(range(len(loads)), count):
            reach = {group for number in chosen for group in groups_of[number]}
            most = max(most, sum(loads[n] for n in chosen) / sum(sizes[group] for group in reach))
    return most


@pytest.mark.parametrize("seed", range(60))
def test_the_most_loaded_member_has_what_ownership_forces(seed):
    rng = random.Random(seed)
    num_groups = rng.randrange(1, 7)
    sizes = tuple(rng.randrange(1, 4) for _ in range(num_groups))
    groups_of = tuple(
        tuple(sorted(rng.sample(range(num_groups), rng.randrange(1, num_groups + 1)))) for _ in range(rng.randrange(1, 7))
    )
    loads = tuple(rng.choice((0, 1, rng.randrange(10**6), 10**12)) for _ in groups_of)
    if not any(loads):
        return
    shares, bound = balance(loads, groups_of, sizes)
    assert bound == pytest.approx(forced_by_ownership(loads, groups_of, sizes))
    per_group = np.zeros(num_groups)
    for load, groups, share in zip(loads, groups_of, shares, strict=True):
        assert set(share) <= set(groups)
        assert min(share.values(), default=0) >= 0
        assert sum(share.values()) == pytest.approx(load)
        for group, amount in share.items():
            per_group[group] += amount
    assert (per_group / np.array(sizes)).max() == pytest.approx(bound)


def test_what_is_not_forced_is_even_too():
    """One class overloads its only member; the others still share what is left evenly."""
    shares, bound = balance((100, 30), ((0,), (0, 1, 2)), (1, 1, 1))
    assert bound == 100
    assert shares[1] == {1: 15, 2: 15} or shares[1] == {0: 0, 1: 15, 2: 15}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, pp=2, dp=3, ep=3, etp=2),
        ParallelLayout(tp=3, cp=2, dp=2, ep=4, etp=1),
        ParallelLayout(tp=4, pp=3, dp=2, ep=2, etp=4, cp=2),
    ],
)
def test_members_are_the_replicas(layout):
    classes = SourceClasses(layout)
    for stage in range(layout.pp):
        for tp in range(layout.tp):
            assert classes.members(classes.dense(stage, tp)).tolist() == sorted(dense_replicas(layout, tp=tp, pp=stage))
        for ep in range(layout.ep):
            for etp in range(layout.etp):
                members = classes.members(classes.expert(stage, ep, etp)).tolist()
                assert members == sorted(expert_replicas(layout, etp=etp, ep=ep, pp=stage))
        every = classes.members(classes.replicated(stage)).tolist()
        assert every == list(range(stage * classes.ranks_per_stage, (stage + 1) * classes.ranks_per_stage))


def test_quotas_are_those_of_the_members():
    layout = ParallelLayout(tp=2, pp=2, dp=3, ep=3)
    classes = SourceClasses(layout)
    loads = np.random.default_rng(2).integers(0, 10**9, classes.num_classes)
    quotas, bound = stage_quotas(classes, loads)
    sent = np.zeros(layout.world_size)
    for number, quota in enumerate(quotas):
        assert quota.sum() == pytest.approx(loads[number])
        sent[classes.members(number)] += quota
    assert sent.max() == pytest.approx(bound)
    stages = loads.reshape(layout.pp, -1).sum(axis=1)
    assert bound >= stages.max() / classes.ranks_per_stage - 1
