"""Creates every actor of a run in the bundles that the cluster gave it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.config.sections import ClusterSection
from megatron_rl.controller.actors import CriticActor, EngineActor, EngineNodeActor, ReferenceActor, TrainerActor
from megatron_rl.controller.layouts import RunLayouts
from megatron_rl.controller.model_setup import ModelSetup
from megatron_rl.controller.placement import Cluster
from megatron_rl.controller.remote import CriticGroup, ReferenceGroup, RemoteEngine, TrainerGroup
from megatron_rl.controller.setups import EngineSetup, WorkerSetup
from megatron_rl.types.layout import ParallelLayout


class ActorFactory:
    """`setup`: the policy's ranks, with the critic's section wherever the critic lives; the other roles' follow from it."""

    def __init__(self, cluster: Cluster, section: ClusterSection, layouts: RunLayouts, setup: WorkerSetup) -> None:
        self._cluster, self._section, self._layouts, self._setup = cluster, section, layouts, setup

    def trainers(self, key: bytes) -> TrainerGroup:
        """The policy's ranks, in the first bundles, with the critic where it has no ranks of its own. `key`: the receivers'."""
        setup = self._setup if self._layouts.critic is None else replace(self._setup, critic=None)
        return TrainerGroup(self._ranks(TrainerActor, "trainer", setup, 0), setup.layout, key, self._cluster.logs)

    def critic(self, layout: ParallelLayout) -> CriticGroup:
        """In the bundles behind the trainer's."""
        setup = replace(self._setup, layout=layout)
        ranks = self._ranks(CriticActor, "critic", setup, self._layouts.trainer.world_size)
        return CriticGroup(ranks, layout, self._cluster.logs)

    def reference(self, layout: ParallelLayout, model: ModelSetup) -> ReferenceGroup:
        """In the bundles behind the critic's."""
        critic = self._layouts.critic
        setup = replace(self._setup, layout=layout, model=model, critic=None)
        first = self._layouts.trainer.world_size + (0 if critic is None else critic.world_size)
        return ReferenceGroup(self._ranks(ReferenceActor, "reference", setup, first), layout, self._cluster.logs)

    def engines(self, setup: EngineSetup) -> list[RemoteEngine]:
        """Each with an actor per further node that it spans."""
        cluster, python, engines = self._cluster, self._section.engine_python, []
        for number in range(setup.section.num_engines):
            name = f"engine-{number}"
            first, *further = cluster.plan.engines[number]
            nodes = [
                cluster.create(EngineNodeActor, f"{name}-node-{rank}", place, python, setup, number, rank)
                for rank, place in enumerate(further, start=1)
            ]
            actor = cluster.create(EngineActor, name, first, python, setup, number)
            engines.append(RemoteEngine(actor, name, cluster.logs, nodes))
        return engines

    def _ranks(self, kind: type, name: str, setup: WorkerSetup, first: int) -> list[Any]:
        """One actor per rank, in the trainers' bundles from `first` on."""
        cluster, python = self._cluster, self._section.trainer_python
        return [
            cluster.create(kind, f"{name}-{rank}", cluster.plan.trainers[first + rank], python, setup, rank)
            for rank in range(setup.layout.world_size)
        ]
