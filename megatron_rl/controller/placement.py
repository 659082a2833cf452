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
class BundlePlan:
    """One bundle per trainer rank, then, engine by engine, one for each of its nodes."""

    bundles: tuple[Mapping[str, float], ...]
    num_trainer_ranks: int
    nodes_per_engine: int = 1

    def engine_bundles(self, number: int) -> range:
        """The bundles of one engine, its first node before the others."""
        first = self.num_trainer_ranks + number * self.nodes_per_engine
        return range(first, first + self.nodes_per_engine)

    @property
    def num_cpus(self) -> int:
        return len(self.bundles)


def plan_bundles(
    section: ClusterSection, num_trainer_ranks: int, num_engines: int, ranks_per_engine: int, nodes_per_engine: int = 1
) -> BundlePlan:
    """What to reserve: a CPU for each actor, and the GPUs of its ranks."""

    def bundle(num_gpus: float) -> Mapping[str, float]:
        return {"CPU": 1.0, "GPU": num_gpus} if num_gpus else {"CPU": 1.0}

    trainers = [bundle(section.gpus_per_trainer_rank)] * num_trainer_ranks
    gpus_per_node = section.gpus_per_engine_rank * ranks_per_engine / nodes_per_engine
    engines = [bundle(gpus_per_node)] * (num_engines * nodes_per_engine)
    return BundlePlan((*trainers, *engines), num_trainer_ranks, nodes_per_engine)


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

    def create(self, actor_class: type, name: str, bundle: int, python: str | None, *args: Any) -> Any:
        """An actor in a bundle; `python` is its interpreter (None: this one)."""
        resources = self.plan.bundles[bundle]
        runtime_env: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}}
        if python:
            runtime_env["py_executable"] = python
        return (
            ray.remote(actor_class)
            .options(
                name=name,
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                runtime_env=runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
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
