"""Ray: connecting, reserving bundles and making actors. The only file that knows how processes come to be."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.config.sections import ClusterSection


class PlacementError(RuntimeError):
    """The cluster cannot hold the run; the message is one line."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs: its bundle, and what of it is its own."""

    bundle: int
    num_gpus: float = 0.0
    num_cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """What to reserve, and who runs where: a place per trainer rank (a critic's on ranks of its own behind the policy's),
    and per engine one for each of its nodes, the first before the others."""

    bundles: tuple[Mapping[str, float], ...]
    trainers: tuple[Place, ...]
    engines: tuple[tuple[Place, ...], ...]

    @property
    def num_cpus(self) -> int:
        return int(sum(bundle["CPU"] for bundle in self.bundles))

    def trainers_beside(self, place: Place) -> list[int]:
        """The trainer ranks in an engine node's bundle."""
        return [rank for rank, trainer in enumerate(self.trainers) if trainer.bundle == place.bundle]


def plan_bundles(
    section: ClusterSection, num_trainer_ranks: int, num_engines: int, ranks_per_engine: int, nodes_per_engine: int = 1
) -> BundlePlan:
    """A CPU for each actor, and the GPUs of its ranks. Colocated: one bundle per engine node holds it and its share of the
    trainer ranks, consecutive ones; the GPUs are reserved for the trainers, and the engine is told which they are."""
    num_nodes = num_engines * nodes_per_engine
    if section.placement == "colocated":
        share = num_trainer_ranks // num_nodes
        trainers = tuple(Place(rank // share, section.gpus_per_trainer_rank) for rank in range(num_trainer_ranks))
        bundles = [_bundle(share + 1, share * section.gpus_per_trainer_rank)] * num_nodes
        nodes = [Place(number) for number in range(num_nodes)]
    else:
        gpus_per_node = section.gpus_per_engine_rank * ranks_per_engine / nodes_per_engine
        trainers = tuple(Place(rank, section.gpus_per_trainer_rank) for rank in range(num_trainer_ranks))
        bundles = [_bundle(1, section.gpus_per_trainer_rank)] * num_trainer_ranks + [_bundle(1, gpus_per_node)] * num_nodes
        nodes = [Place(num_trainer_ranks + number, gpus_per_node) for number in range(num_nodes)]
    starts = range(0, num_nodes, nodes_per_engine)
    return BundlePlan(tuple(bundles), trainers, tuple(tuple(nodes[at : at + nodes_per_engine]) for at in starts))


def _bundle(num_cpus: float, num_gpus: float) -> Mapping[str, float]:
    return {"CPU": float(num_cpus), "GPU": num_gpus} if num_gpus else {"CPU": float(num_cpus)}


class Cluster:
    """A Ray connection with the run's bundles reserved. `close` undoes all of it."""

    def __init__(self, section: ClusterSection, plan: BundlePlan, namespace: str) -> None:
        """Connect to `cluster.ray_address`, else RAY_ADDRESS, else start a local Ray. Raises PlacementError in time."""
        self._section, self.plan = section, plan
        address = section.ray_address or os.environ.get("RAY_ADDRESS")
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {"namespace": namespace, "log_to_driver": True, "logging_level": logging.ERROR}
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves the ranks beside any other work
        if address:
            options["address"] = address
        else:
            # "local": whatever cluster this machine last saw is not ours. Logical CPUs: the actors take turns on whatever
            # cores there are.
            options |= {"address": "local", "num_cpus": plan.num_cpus}
            options |= {"include_dashboard": False, "object_store_memory": 256 * 1024**2}
        ray.init(**options)
        self._group: PlacementGroup = placement_group(list(plan.bundles), strategy="PACK")
        if not self._group.wait(section.start_timeout_s):
            ray.shutdown()
            raise PlacementError(
                f"the Ray cluster cannot hold {len(plan.bundles)} bundles ({plan.bundles[0]}, ...) within "
                f"cluster.start_timeout_s={section.start_timeout_s:.0f}; free resources: {ray.available_resources()}"
            )

    def create(self, actor_class: type, name: str, place: Place, python: str | None, *args: Any) -> Any:
        """An actor at its place; `python` is its interpreter (None: this one)."""
        runtime_env: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}}
        if python:
            runtime_env["py_executable"] = python
        return (
            ray.remote(actor_class)
            .options(
                name=name,
                num_cpus=place.num_cpus,
                num_gpus=place.num_gpus,
                max_restarts=0,
                runtime_env=runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle),
            )
            .remote(*args)
        )

    @property
    def is_single_node(self) -> bool:
        """Whether every process runs on this machine."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    @property
    def logs(self) -> str:
        """Where Ray keeps the logs of this run's processes, on each node."""
        return f"{ray._private.worker._global_node.get_session_dir_path()}/logs"

    def close(self) -> None:
        ray.shutdown()
