"""What is reserved for a run."""

from __future__ import annotations

from megatron_rl.config.sections import ClusterSection
from megatron_rl.controller.placement import plan_bundles


def test_bundles_are_trainers_then_engines():
    cpu = plan_bundles(ClusterSection(), 3, 2, 4)
    assert cpu.bundles == ({"CPU": 1.0},) * 5
    gpu = plan_bundles(ClusterSection(gpus_per_trainer_rank=1, gpus_per_engine_rank=0.5), 2, 1, 4)
    assert gpu.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 2.0})
