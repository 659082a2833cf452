"""What is reserved for a run."""

from __future__ import annotations

from megatron_rl.config.sections import ClusterSection
from megatron_rl.controller.placement import plan_bundles


def test_bundles_are_trainers_then_engines():
    cpu = plan_bundles(ClusterSection(), 3, 2, 4)
    assert cpu.bundles == ({"CPU": 1.0},) * 5
    gpu = plan_bundles(ClusterSection(gpus_per_trainer_rank=1, gpus_per_engine_rank=0.5), 2, 1, 4)
    assert gpu.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 2.0})


def test_an_engine_over_nodes_has_a_bundle_on_each():
    plan = plan_bundles(ClusterSection(gpus_per_engine_rank=1), 3, 2, 16, nodes_per_engine=2)
    assert plan.bundles[3:] == ({"CPU": 1.0, "GPU": 8.0},) * 4
    assert [list(plan.engine_bundles(number)) for number in range(2)] == [[3, 4], [5, 6]]
