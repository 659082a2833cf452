"""The experts re-divide the ranks of the dense layers."""

from __future__ import annotations

from megatron_rl.types.layout import EngineLayout, ParallelLayout


def test_world_size_counts_both_ways() -> None:
    layout = ParallelLayout(tp=2, pp=3, cp=5, ep=4, etp=1, dp=14)
    assert layout.world_size == 2 * 3 * 5 * 14
    assert layout.expert_dp == 35
    assert layout.etp * layout.ep * layout.expert_dp * layout.pp == layout.world_size
    assert EngineLayout(tp=3, num_engines=5).num_ranks == 15
