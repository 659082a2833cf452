"""What is reserved for a run, and who runs where."""

from __future__ import annotations

from megatron_rl.config.sections import ClusterSection
from megatron_rl.controller.placement import Place, plan_bundles


def test_bundles_are_trainers_then_engines():
    cpu = plan_bundles(ClusterSection(), 3, 2, 4)
    assert cpu.bundles == ({"CPU": 1.0},) * 5 and cpu.num_cpus == 5
    gpu = plan_bundles(ClusterSection(gpus_per_trainer_rank=1, gpus_per_engine_rank=0.5), 2, 1, 4)
    assert gpu.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 2.0})
    assert gpu.trainers == (Place(0, 1), Place(1, 1)) and gpu.engines == ((Place(2, 2.0),),)


def test_an_engine_over_nodes_has_a_bundle_on_each():
    plan = plan_bundles(ClusterSection(gpus_per_engine_rank=1), 3, 2, 16, nodes_per_engine=2)
    assert plan.bundles[3:] == ({"CPU": 1.0, "GPU": 8.0},) * 4
    assert [[place.bundle for place in engine] for engine in plan.engines] == [[3, 4], [5, 6]]
    assert not any(plan.trainers_beside(place) for engine in plan.engines for place in engine)


def test_colocated_engines_and_trainers_share_bundles_and_gpus():
    section = ClusterSection(placement="colocated", gpus_per_trainer_rank=1, gpus_per_engine_rank=1)
    plan = plan_bundles(section, 16, 2, 8)
    assert plan.bundles == ({"CPU": 9.0, "GPU": 8},) * 2 and plan.num_cpus == 18
    assert [place.bundle for place in plan.trainers] == [0] * 8 + [1] * 8
    assert {place.num_gpus for place in plan.trainers} == {1}
    assert plan.engines == ((Place(0),), (Place(1),))
    assert [plan.trainers_beside(engine[0]) for engine in plan.engines] == [list(range(8)), list(range(8, 16))]


def test_a_colocated_engine_over_nodes_shares_each_of_them():
    section = ClusterSection(placement="colocated", gpus_per_trainer_rank=1, gpus_per_engine_rank=1)
    plan = plan_bundles(section, 16, 1, 16, nodes_per_engine=2)
    assert plan.bundles == ({"CPU": 9.0, "GPU": 8},) * 2
    assert [plan.trainers_beside(node) for node in plan.engines[0]] == [list(range(8)), list(range(8, 16))]


def test_without_gpus_the_same_bundles_hold_processes_alone():
    plan = plan_bundles(ClusterSection(placement="colocated"), 2, 2, 2)
    assert plan.bundles == ({"CPU": 2.0},) * 2
    assert plan.trainers == (Place(0), Place(1)) and plan.engines == ((Place(0),), (Place(1),))
