"""The rounds of a relayed sync: nobody passes on what it does not hold, and in the end every rank has every source."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.model_families.registry import FAMILIES
from megatron_rl.resharding.hops import relay_rounds, sources_of
from megatron_rl.resharding.plan import build_reshard_plan
from megatron_rl.types.layout import EngineLayout, ParallelLayout

FAMILY = "qwen3_moe"
DIMS = FAMILIES[FAMILY].debug_dims


def build(layout, engine, relay):
    plan = build_reshard_plan(FAMILY, DIMS, layout, engine, relay=relay, cut_rows=1)
    return plan, dict.fromkeys(plan.target_shapes, "bfloat16")


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(tp=2, pp=2, ep=2)], ids=str)
@pytest.mark.parametrize("engine", [EngineLayout(2, 5), EngineLayout(1, 2), EngineLayout(4, 3)], ids=str)
def test_every_rank_gets_every_source_from_one_that_has_it(layout, engine):
    plan, dtypes = build(layout, engine, relay=True)
    elements = plan.num_elements_between()
    has = [set(elements[:, rank].nonzero()[0].tolist()) for rank in range(engine.num_ranks)]
    received, passed_on = elements.sum(axis=0), np.zeros(engine.num_ranks, dtype=np.int64)
    rounds = relay_rounds(plan, dtypes)
    assert len(rounds) == engine.num_engines - 1
    for hops in rounds:
        assert len({hop.target_rank for hop in hops}) == len(hops), "one at a time into a rank"
        for hop in hops:
            assert set(hop.needs) <= has[hop.source_rank] and hop.number not in has[hop.target_rank]
            assert hop.target_rank == (hop.source_rank + engine.tp) % engine.num_ranks
        for hop in hops:
            has[hop.target_rank].add(hop.number)
            received[hop.target_rank] += hop.table.num_elements
            passed_on[hop.source_rank] += hop.table.num_elements
    assert passed_on.tolist() == plan.num_relayed().tolist()
    assert [sorted(sources) for sources in has] == [sources_of(plan, rank) for rank in range(engine.num_ranks)]
    direct, _ = build(layout, engine, relay=False)
    assert received.tolist() == direct.num_elements_between().sum(axis=0).tolist()


def test_without_relay_there_are_trainers_only():
    plan, dtypes = build(ParallelLayout(tp=2, pp=2), EngineLayout(2, 3), relay=False)
    assert relay_rounds(plan, dtypes) == [] and sources_of(plan, 5) == [1, 3]
    alone, dtypes = build(ParallelLayout(), EngineLayout(2, 1), relay=True)
    assert relay_rounds(alone, dtypes) == [] and sources_of(alone, 1) == [0]
