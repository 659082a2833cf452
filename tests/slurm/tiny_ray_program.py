#!/usr/bin/env python
"""Stands where `megatron-rl` does in slurm/train.sbatch: `train CONFIG [key=value ...]` runs a tiny Ray program.

It runs one task on each node and prints where; then it ends with the code `exit=N`, or with `wait=1` waits for TERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=1)
def where() -> str:
    return socket.gethostname()


def main(command: str, config: str, *overrides: str) -> int:
    assert command == "train"
    settings = dict(override.split("=") for override in overrides)
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="warning")
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
    hosts = ray.get([where.options(scheduling_strategy=strategy).remote() for strategy in on], timeout=60)
    print(
        f"tiny program: {config} on {','.join(sorted(hosts))} with {ray.cluster_resources()['CPU']:.0f} CPUs",
        flush=True,
    )
    if "wait" in settings:
        signal.alarm(120)  # whatever happens, this process ends
        signal.sigwait({signal.SIGTERM})
        print("tiny program: stopped in order", flush=True)
    ray.shutdown()
    return int(settings.get("exit", 0))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit(main(*sys.argv[1:]))
